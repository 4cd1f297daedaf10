"""Parallelism on paper: what a model needs, and how fast it trains, under parallelism that is not run here.

``layout`` says how GPUs may be arranged, ``cluster`` what they can do, ``layer`` what one layer costs; ``memory``,
``traffic`` and ``offload`` add up bytes, ``prediction`` a step; ``ranking`` orders the layouts, ``table`` says why.
The stages of a pipeline come from ``finetune.plan.pipeline``. Nothing here was measured: see the assumptions in
``cluster``.
"""

from .cluster import cluster_of
from .ranking import Question
from .table import explain, show

__all__ = ["Question", "cluster_of", "explain", "show"]
