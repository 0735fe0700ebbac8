"""Published claims, each computed anew by one script: a small setting of minutes, and the paper's by ``--paper``.

Every script writes ``results/<name>.json``, a plot where there is something to draw, and a page ``results/<name>.md``
with the published figures beside ours. No figure on a page is typed by hand but those that are quoted, with source.
"""
