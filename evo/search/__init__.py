"""What to try next, and which candidate won: the loop, its samplers and operators, the finals."""
