"""The ops and the whole drafter as their definition says, in plain PyTorch: slow, and made to be checked by eye.

Every function has the name, arguments, defaults, outputs and in-place writes of the op it defines, plus ``dtype``: all arithmetic is done
in it and floating outputs come back in it, unrounded (float64 unless asked). The package never imports this; tests and bench do.
"""
