"""Mixture of experts: routers, dispatch, experts spread over ranks."""

from zeroengine.moe.capacity import Capacity
from zeroengine.moe.experts import ExpertBank, ExpertList, Experts
from zeroengine.moe.group import ExpertGroup
from zeroengine.moe.layer import MoE, SparseExperts
from zeroengine.moe.router import Router, RouterRule, Routing
from zeroengine.moe.statistics import LayerStatistics

__all__ = [
    "Capacity", "ExpertBank", "ExpertGroup", "ExpertList", "Experts", "LayerStatistics", "MoE", "Router", "RouterRule", "Routing",
    "SparseExperts",
]  # fmt: skip
