"""How tokens travel to their experts and back: the contract, and one file per way."""

from hyper_parallel.core.expert_parallel.exchange.base import Exchange, LocalInputs, Places, Routing
from hyper_parallel.core.expert_parallel.exchange.dedup import DedupExchange
from hyper_parallel.core.expert_parallel.exchange.rows import RowsExchange
from hyper_parallel.core.expert_parallel.exchange.split import SplitExchange

__all__ = ["DedupExchange", "Exchange", "LocalInputs", "Places", "Routing", "RowsExchange", "SplitExchange"]
