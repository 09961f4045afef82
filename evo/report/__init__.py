"""Pages and figures of a run: what it found, how it came there, and what of that can be trusted.

Everything here renders an `evo.analysis.outcome.RunOutcome`: `figures` draws it, `sentences` says it, `page` makes one HTML
file of both, `live` serves the same pages while a search goes on, and `trials` copies candidates to Optuna's storage.
"""
