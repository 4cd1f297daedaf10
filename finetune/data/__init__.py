"""From files to the tensors of a micro-batch.

In the order of the work: ``sources`` (files and datasets of the hub, record by record), ``formats`` and ``messages``
(a record to a conversation), ``rendering``, ``template_process`` and ``chat_template`` (a conversation to text),
``encoding`` (text to tokens and spans), ``encoding_workers`` (on all cores), ``preparation`` (into the cache), ``rows``
(read back), ``dataset`` (the rows of a run), ``streaming`` (the rows of a run that prepares nothing), ``packing`` and
``sampler`` (which rows in which step), ``batches`` (the rows of a step), ``collation`` (tensors).
"""
