"""Questions to the lineage: one question a file, one frozen record an answer.

Runs and candidates are named by their names or unique beginnings of these, the last run by "latest". A question raises
UnknownNameError for an unknown name, and StoreError for the beginning of several.
"""
