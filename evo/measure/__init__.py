"""Whether a candidate is right, how fast it is, and how sure that is: the gate, the clock, references, buffers."""
