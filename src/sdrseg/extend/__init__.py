"""Add classes to a trained model, with images in which only these are labelled. docs/extend.md tells how."""
