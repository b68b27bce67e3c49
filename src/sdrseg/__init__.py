"""Continual semantic segmentation: learn new classes without the old images and without forgetting the old classes."""

__version__ = "0.1.0.dev0"
