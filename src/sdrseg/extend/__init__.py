"""Add classes to a trained model, with images in which only these are labelled. See docs/extend.md."""
