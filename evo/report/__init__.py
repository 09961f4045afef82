"""Pages and figures of a run: what it found, how it got there, and which of its figures can be trusted.

Everything here renders an `evo.analysis.outcome.RunOutcome`: `sentences` has its words, `page` its figures and the HTML file
of both, `live` serves the same pages while a search goes on, and `trials` copies candidates to Optuna's storage.
"""
