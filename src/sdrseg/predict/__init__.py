"""Segment images with a trained model: `sdrseg predict`, and `sdrseg.load` in Python."""

from sdrseg.predict.loading import load
from sdrseg.predict.model import Model
from sdrseg.predict.prediction import Area, ClassInfo, Prediction

__all__ = ["Area", "ClassInfo", "Model", "Prediction", "load"]
