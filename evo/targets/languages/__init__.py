"""Languages: how a template is written, and what compiles it. One module each, found by its name; it defines `LANGUAGE`, an
object of protocol `evo.targets.Language`. A template has its language by its suffix: cuda.cu.j2 is CUDA C++ for target cuda.
"""
