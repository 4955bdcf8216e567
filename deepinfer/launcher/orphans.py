"""Engines whose driver has died: their loaded ranks wait for a new one, which is started here."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from deepinfer.actors.adoption import FoundGroup, end_group, find_groups
from deepinfer.actors.engine_facts import EngineFacts
from deepinfer.actors.rank_life import RankSource
from deepinfer.config import ClusterConfig, decode_config
from deepinfer.errors import ClusterError
from deepinfer.launcher.differences import check_joinable
from deepinfer.launcher.engine import EngineExistsError, start_engine
from deepinfer.log import get_logger

_LOGGER = get_logger("launcher")


@dataclass(slots=True, frozen=True)
class Orphans:
    """The living ranks of an engine without a driver. `facts` and `source` are None when none of them has loaded."""

    groups: Collection[FoundGroup]
    facts: EngineFacts | None
    source: RankSource | None

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return sum(len(group.actors) for group in self.groups)


def find_orphans(config: ClusterConfig) -> Orphans | None:
    """Return the living ranks of the engine `config.name`, which has no driver; None when there are none."""
    groups = find_groups(config.name, namespace=config.ray.namespace).values()
    if not any(group.actors for group in groups):
        return None
    loaded = [state for group in groups for state in group.states.values()]
    for state in loaded:
        if state.source is not None and state.facts is not None:
            facts = EngineFacts(
                name=config.name,
                config=decode_config(state.source.config),
                model_directory=state.source.model_directory,
                vocab_size=state.facts.vocab_size,
                max_model_len=state.facts.max_model_len,
                ranks=(state.facts.ready,),
                is_shared=True,
            )
            return Orphans(groups, facts, state.source)
    return Orphans(groups, None, None)


def revive(config: ClusterConfig, model_digest: str) -> bool:
    """See that the engine `config.name`, which has no driver, gets one; False when no ranks of it are left.

    Raises ConfigError when it is another engine than asked for, ClusterError when it can't be taken over.
    """
    orphans = find_orphans(config)
    if orphans is None:
        return False
    try:
        take_over(orphans, config, model_digest)
    except EngineExistsError:
        _LOGGER.info("another command has the engine %s taken over", config.name)
    return True


def take_over(orphans: Orphans, config: ClusterConfig, model_digest: str) -> EngineFacts:
    """Start a driver that takes the ranks over, and return what the engine is.

    The engine keeps the settings with which it was brought up. A group of which ranks are missing is started again.
    Raises ConfigError, and changes nothing, when the engine is another one than asked for; ClusterError when it
    has not finished loading; EngineExistsError when another process does the same.
    """
    if orphans.facts is None or orphans.source is None:
        raise ClusterError(
            f"the driver of the engine {config.name!r} died while the ranks were loading; "
            "bring it up again with deepinfer-cluster up"
        )
    check_joinable(config, model_digest, orphans.facts)
    _LOGGER.info("the driver of %s has died; a new one takes over its %d ranks", config.name, orphans.num_ranks)
    begin = time.monotonic()
    num_ranks = {"prefill": orphans.facts.config.prefill.ranks, "decode": orphans.facts.config.decode.ranks}
    for group in orphans.groups:
        obstacle = group.obstacle(orphans.source, num_ranks[group.role] or 1)
        if obstacle is not None:
            _LOGGER.warning("%s: the %s ranks are all loaded again", obstacle, group.role)
    _, facts = start_engine(
        orphans.facts.config,
        name=config.name,
        model_directory=orphans.source.model_directory,
        program=orphans.source.program,
        detached=True,
    )
    _LOGGER.info("the new driver has taken over in %.1f s", time.monotonic() - begin)
    return facts


def end_orphans(config: ClusterConfig) -> None:
    """End what lives of the engine `config.name`, and free its places in Ray; raises ClusterError when ranks stay."""
    for group in find_groups(config.name, namespace=config.ray.namespace).values():
        end_group(config.name, group, namespace=config.ray.namespace)
