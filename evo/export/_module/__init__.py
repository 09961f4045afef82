"""What an exported module runs on: copied beside its frontend, sources and binaries as it stands.

Only PyTorch and the standard library are imported here. Of all this evo itself uses _processor only.
"""
