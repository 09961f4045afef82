"""The figures of a report: one module each, that computes what it shows and draws it."""
