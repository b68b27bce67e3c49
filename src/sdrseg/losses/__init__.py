"""Losses: pure functions of tensors, at least float32 inside, no Python loop over classes, images or pixels.

A loss comes in two halves, so that processes can add up what they saw in between: a function ending in `_sums` does
the work on the pixels and returns sums; `mean` or another small function turns sums into the value. The sums of N
processes added together give exactly the value of one process with all the images.
"""
