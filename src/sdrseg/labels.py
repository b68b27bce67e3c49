"""What labels mean everywhere: in masks, in label tables, in the losses and in scores."""

VOID = 255
"""The label of pixels that are neither learned nor scored."""
