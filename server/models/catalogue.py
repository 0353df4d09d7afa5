"""The models of a registry and those that come with autoshard, as the service shows and changes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autoshard.api import AliasChange, ModelList, ModelState, ModelSummary
from autoshard.core.choices import Alias
from autoshard.core.machine import device_family
from costmodel.registry.listing import History, alias_histories, listed_versions
from costmodel.registry.objects import BASELINES
from costmodel.registry.versions import AliasChangedError, Registry, find_registry, shipped_models
from server.access import Principal
from server.problems import ModelChangedError, UnknownModelError, WorseModelError

COST = "cost"


class ModelCatalogue:
    """Lists models and changes which are used; planning processes look at the registry for every request.

    Args:
        root: Folder of the registry; the default one if None.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root

    def list(self, kind: str | None, name: str | None, *, cards: bool = False) -> ModelList:
        """All versions.

        Args:
            kind: Only those of this kind.
            name: Only those of this device.
            cards: Whether with their cards.

        Raises:
            ModelError: If a card or an alias is damaged.
        """
        found = listed_versions(Registry(self._root), kind, name)
        return ModelList(models=found if cards else [item.model_copy(update={"card": None}) for item in found])

    def find(self, kind: str, name: str, version: str) -> ModelSummary:
        """One version.

        Raises:
            UnknownModelError: If there is none.
            ModelError: If a card or an alias is damaged.
        """
        for item in listed_versions(Registry(self._root), kind, name):
            if item.id == version:
                return item
        raise UnknownModelError(f"no version {version} of {kind} {name} is in the registry")

    def history(self, item: ModelSummary) -> History:
        """What the aliases of a version's model have named, as `alias_histories`.

        Raises:
            ModelError: If an alias is damaged.
        """
        return alias_histories(Registry(self._root), item)

    def state(self, kind: str, name: str) -> ModelState:
        """What a model's aliases name.

        Raises:
            UnknownModelError: If there is no such model.
            ModelError: If an alias is damaged.
        """
        models, shipped = Registry(self._root), shipped_models()
        histories = {alias: models.history(kind, name, alias) for alias in Alias}
        current = {alias: entries[-1].id if entries else None for alias, entries in histories.items()}
        production = current[Alias.PRODUCTION] or shipped.production_id(kind, name)
        if production is None and not (models.root / kind / name).is_dir():
            raise UnknownModelError(f"there is no {kind} model named {name}")
        return ModelState(
            kind=kind,
            name=name,
            production=production,
            candidate=current[Alias.CANDIDATE],
            history={alias.value: list(entries) for alias, entries in histories.items()},
        )

    def has_changed(self, kind: str, name: str, alias: Alias, request: str) -> bool:
        """Whether a request has changed an alias already, though it was not answered.

        Raises:
            ModelError: If the registry does not answer.
        """
        models = Registry(self._root, request=request)
        models.pull(kind, name)
        return models.has_changed(kind, name, alias)

    def check_not_worse(self, kind: str, name: str, version: str) -> None:
        """Checks that a version was not found worse than the one in use, or than baselines, when it was trained.

        Raises:
            WorseModelError: If one did.
            ModelError: If an alias is damaged.
        """
        models = Registry(self._root)
        others = (BASELINES, self.used_id(kind, name))
        found = [models.worse_than(kind, name, version, one) for one in others if one is not None]
        if worse := "; ".join(reason for reason in found if reason is not None):
            raise WorseModelError(f"was worse when it was trained: {worse}; send force to use it", field="version")

    def promote(
        self,
        kind: str,
        name: str,
        version: str,
        alias: Alias,
        actor: Principal,
        expected: str | None = None,
        request: str = "",
    ) -> ModelState:
        """Has an alias name a version.

        Args:
            kind: What the model is for.
            name: Which one.
            version: Its id.
            alias: The alias.
            actor: Who does it.
            expected: ETag of the state that it is decided by; None to take no notice of it.
            request: Name of the request, which makes one change however often it is sent; empty if it has none.

        Raises:
            ModelChangedError: If the aliases name others by now.
            ModelError: If the version is missing or damaged; the alias stays as it was.
        """
        models = Registry(self._root, author=actor.name, request=request)
        with _changes_named():
            models.promote(kind, name, version, alias, seen=self._seen(models, kind, name, alias, expected))
        return self.state(kind, name)

    def roll_back(
        self, kind: str, name: str, alias: Alias, actor: Principal, expected: str | None = None, request: str = ""
    ) -> ModelState:
        """Gives an alias back to the version that had it before; arguments and errors as of `promote`."""
        self.state(kind, name)
        models = Registry(self._root, author=actor.name, request=request)
        with _changes_named():
            models.roll_back(kind, name, alias, seen=self._seen(models, kind, name, alias, expected))
        return self.state(kind, name)

    def used_id(self, kind: str, name: str) -> str | None:
        """Id of the model of a kind that is in use under a name; None where none is, as where prices are analytic.

        Raises:
            ModelError: If an alias is damaged.
        """
        models = find_registry(kind, name, self._root)
        return None if models is None else models.production_id(kind, name)

    def candidate_of(self, device: str) -> tuple[str, str] | None:
        """Name and id of the cost model that is tried out for a device, if it is not the one in use.

        Raises:
            ModelError: If an alias is damaged.
        """
        models = Registry(self._root)
        for name in dict.fromkeys((device, device_family(device))):
            entries = models.history(COST, name, Alias.CANDIDATE)
            if entries and entries[-1].id != models.production_id(COST, name):
                return name, entries[-1].id
        return None

    def candidates(self) -> Sequence[tuple[str, str]]:
        """Names and ids of all cost models that are tried out.

        Raises:
            ModelError: If the registry is damaged.
        """
        listed = listed_versions(Registry(self._root), COST)
        names = {item.name for item in listed if Alias.CANDIDATE in item.aliases}
        found = (self.candidate_of(name) for name in sorted(names))
        return [one for one in found if one is not None]

    def _seen(
        self, models: Registry, kind: str, name: str, alias: Alias, expected: str | None
    ) -> tuple[AliasChange, ...] | None:
        """Entries of an alias in the state that a change is decided by; None if these do not matter.

        Raises:
            ModelChangedError: If it is another state by now.
        """
        if expected is None:
            return None
        models.pull(kind, name)
        if models.has_changed(kind, name, alias):
            return None
        seen = models.history(kind, name, alias)
        if expected not in ("*", self.state(kind, name).etag):
            raise ModelChangedError(f"the aliases of {kind} {name} name other versions by now", field="If-Match")
        return seen


@contextmanager
def _changes_named() -> Iterator[None]:
    try:
        yield
    except AliasChangedError as error:
        raise ModelChangedError(error.message, field="If-Match") from error
