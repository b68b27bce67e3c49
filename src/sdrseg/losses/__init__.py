"""Losses: pure functions of tensors, at least float32 inside, no Python loop over classes, images or pixels.

A loss is computed in two stages: a function ending in `_sums` works on the pixels and returns sums; `mean` or another
small function turns sums into the value. In between, processes add their sums, so N processes give exactly the value of
one process with all the images.
"""
