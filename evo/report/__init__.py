"""Pages and figures of a run: what it found, how it came there, and what of that can be trusted.

Everything here renders an `evo.analysis.outcome.RunOutcome`: `sentences` says it, `page` draws it and makes one HTML file of
both, `live` serves the same pages while a search goes on, and `trials` copies candidates to Optuna's storage.
"""
