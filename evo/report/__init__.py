"""Pictures and pages of a run: what it found, how it came there, and what of that can be trusted.

`evo.report.data` reads a run once; `evo.report.figures` draws, one module for each figure; `evo.report.page` makes one
self-contained HTML file of them, `evo.report.export` files for papers, and `evo.report.live` serves the same pages
while a search goes on.
"""
