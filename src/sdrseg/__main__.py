"""`python -m sdrseg`, and `torchrun -m sdrseg`."""

from sdrseg.cli import main

main()
