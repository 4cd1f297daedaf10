"""Data: from files to the tensors of a micro-batch.

In order of processing: ``sources`` (files and hub datasets, record by record), ``columns`` (a record under the names
that formats know), ``formats`` and ``messages`` (a record to a conversation), ``templates``, ``named_templates``,
``template_process``, ``chat_template`` and ``call_arguments`` (a conversation to text, and the assistant's part of it),
``special_edges`` (texts that hold what a template writes), ``encoding`` (text to tokens and spans),
``encoding_workers`` (on all cores), ``rows`` (into the cache, and read back), ``dataset`` (the rows of a run),
``streaming`` (rows without a cache), ``packing`` and ``concatenation`` (documents that share rows), ``sampler`` (which
rows in which step), ``batches`` (the rows of a step, and their tensors), ``stages`` (batches that grow, and sources
that change), ``text_stream`` (a corpus without a cache); ``prompt_texts`` (what models are asked).
"""
