"""What came of runs, on a page and in a picture. Reads the files of their output folders, and nothing else.

``run_read`` (one run's files), ``charts`` (courses of its figures), ``drawn`` (charts as SVG), ``memory_bars`` (memory
by kind), ``tables`` (figures side by side, differences), ``pages`` (the page, of ``report.html.jinja``), ``plotted``
(the picture, by matplotlib).
"""
