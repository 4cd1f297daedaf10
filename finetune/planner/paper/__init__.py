"""Parallelism on paper: what a model needs, and how fast it trains, under parallelism that is not run here.

``layout`` says how GPUs may be arranged, ``cluster`` what they can do, ``layout_layer`` what one layer costs;
``layout_memory``, ``traffic`` and ``offload`` add up bytes, ``prediction`` a step; ``ranking`` orders the layouts,
``table`` says why. The stages of a pipeline come from ``planner.pipeline_schedule``. Nothing here was measured: see the
assumptions in ``cluster``.
"""

from finetune.planner.paper.cluster import cluster_of
from finetune.planner.paper.ranking import Question
from finetune.planner.paper.table import explain, show

__all__ = ["Question", "cluster_of", "explain", "show"]
