"""Engine metadata to the arguments of our ops: pure functions of tensors. No engine is imported unless one of them asks for it.

Written from the engines' sources and tried against stand-ins of their metadata; not yet run inside an engine (docs/engines.md).
"""
