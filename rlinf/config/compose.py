"""Hydra composes the YAML files; overrides and old names are applied on top; every key remembers its source.

Trees are plain dicts whose strings may still hold `${...}`; `resolve` turns them into values at the very end.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import CollectionNode, MappingNode, Node, SafeLoader, ScalarNode, YAMLError
from yaml import compose as compose_nodes

from rlinf.compat.keys import OLD_GROUPS, RENAMED, is_below, no_effect_paths, rename_path, warn_once
from rlinf.config.schema import ClusterConfig, Config
from rlinf.errors import UserError
from rlinf.storage.redaction import FromEnvironment
from rlinf.typed import block_paths, check_value

Tree = dict[str, Any]
COMMAND_LINE = "command line"
PLACEMENT = "cluster.component_placement"
MOST_VALUES = 100_000  # of a config; recipes have a few hundred
TOO_DEEP = "its blocks are nested too deeply"
ABSENT = object()  # what `get` returns for a key nobody set; None is a value


@dataclass(frozen=True)
class Layer:
    """The keys one source set."""

    source: str  # a file as the user would name it, or `command line`
    tree: Tree


@dataclass(frozen=True)
class Composed:
    """The merged tree before interpolation, and its layers, the last one winning."""

    name: str  # of the config: its file without .yaml
    tree: Tree
    layers: tuple[Layer, ...]  # fragments, the config itself with what is pasted at its end, the command line

    def rank(self, path: str) -> int:
        """Index of the last layer that sets `path`; -1 for none."""
        return max((i for i, layer in enumerate(self.layers) if get(layer.tree, path) is not ABSENT), default=-1)

    def origin(self, path: str) -> str:
        """The source that set `path`, under its present or an old name; the config itself for keys left to default."""
        names = [path, *(old + path[len(n) :] for old, new in RENAMED.items() for n in new if is_below(path, n))]
        rank = max(self.rank(name) for name in names)
        return self.layers[rank if rank >= 0 else -2].source


def compose_config(name_or_path: str, overrides: Sequence[str], config_dir: Path) -> Composed:
    """Read a config by name or path, with its fragments, overrides and old names."""
    groups = [o for o in overrides if _picks_fragment(o)]
    composed = _read(find_config_file(name_or_path, config_dir), groups, config_dir)
    return with_overrides(composed, [o for o in overrides if o not in groups])


def _read(file: Path, groups: Sequence[str], config_dir: Path) -> Composed:
    """What the files say; the layer of the command line, the last, is empty yet."""
    _register_old_groups(config_dir)
    GlobalHydra.instance().clear()
    try:
        own, pasted, picked = _split_pasted(file)
        groups = list(_by_group([*picked, *groups], own).values())
        with _file_for_hydra(file, own, changed=bool(pasted or picked)) as primary, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about search paths
            folders = [f"file://{folder.absolute()}" for folder in (file.parent, config_dir)]
            arguments = [*groups, f"hydra.searchpath={folders}"]
            with initialize_config_dir(str(primary.parent), version_base="1.3"):
                loader = GlobalHydra.instance().config_loader()
                defaults = loader.compute_defaults_list(file.stem, arguments, RunMode.RUN).defaults
                tree = _plain(compose(file.stem, arguments))
        layers = [
            Layer(_shown(path), _mounted(own if path == file else path.read_text(), item.package or ""))
            for item in defaults
            if (path := _fragment(item.config_path or "", (file.parent, config_dir))) is not None
        ]
        for text in pasted:
            layers.append(Layer(_shown(file), _mounted(text, "")))
            tree = merged(tree, layers[-1].tree)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{_shown(file)}: {_one_line(error)}") from error
    except RecursionError:
        raise UserError(f"{_shown(file)}: its `defaults` lead back to a file they start from, or {TOO_DEEP}") from None
    _take_last_placement(tree, layers)
    return Composed(file.stem, tree, (*layers, Layer(COMMAND_LINE, {})))


def with_overrides(files: Composed, overrides: Sequence[str]) -> Composed:
    """A config as the files say it, with `key=value` settings and new names for old keys on top."""
    tree: Tree = deepcopy(files.tree)
    command_line: Tree = {}
    for override in overrides:
        _override(tree, command_line, override)
    composed = Composed(files.name, tree, (*files.layers[:-1], Layer(COMMAND_LINE, command_line)))
    _apply_aliases(composed)
    _check_blocks(composed)
    return composed


def _check_blocks(composed: Composed) -> None:
    """Refuse a value where a block of keys belongs; what reads the blocks may then rely on them."""
    for path in block_paths(Config):
        value = get(composed.tree, path)
        refers = isinstance(value, str) and value.startswith("${")
        if value is not ABSENT and not refers:
            check_value(dict[str, Any], value, path, composed.origin)


def find_config_file(name_or_path: str, config_dir: Path) -> Path:
    """The YAML file meant by a path, or by a name in `config_dir`, whatever its capitals."""
    given = Path(name_or_path)
    if given.suffix in (".yaml", ".yml") and given.is_file():
        return given.absolute()
    named = len(given.parts) == 1
    names = {p.stem: p for p in sorted((config_dir if named else given.parent).glob("*.yaml"))}
    name = given.name.removesuffix(".yaml")
    for candidate in (name, name.lower()):
        if candidate in names and (named or given.suffix):
            return names[candidate].absolute()
    near = get_close_matches(name, names, 3)
    hint = f"did you mean {', '.join(near)}?" if near else "`rlinf recipes` lists them, and a path to a file will do"
    raise UserError(f"config {name_or_path!r} not found in {_shown(config_dir)}; {hint}")


def resolve(composed: Composed, defaults: Tree) -> Tree:
    """Values of every key: `defaults` below the composed tree, interpolations resolved, old names gone."""
    conf = OmegaConf.create(merged(defaults, composed.tree))
    try:
        tree: Tree = OmegaConf.to_container(conf, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        where = error.full_key or ""
        raise UserError(f"{composed.origin(where)}: {where}: {str(error).splitlines()[0]}") from error
    _mark_environment(conf, tree)
    for old in RENAMED:
        take(tree, old)
    _take_no_effect(composed, tree)
    return tree


def _mark_environment(conf: Any, tree: Tree) -> None:
    """Let texts in `tree` that environment variables decide remember how `conf` writes them: they may be secrets."""
    read: list[str] = []

    def env(key: str, *default: Any) -> str | None:
        read.append(key)
        return oc.env(key, *default)

    def mark(node: Any, values: Any) -> None:
        written: Any = OmegaConf.to_container(node, resolve=False)
        for key, text in enumerate(written) if isinstance(written, list) else list(written.items()):
            read.clear()
            inner, value = node[key], values[key]
            if OmegaConf.is_config(inner):
                mark(inner, value)
            elif read and isinstance(value, str):
                values[key] = FromEnvironment(value, str(text))

    if "oc.env" in str(conf):
        OmegaConf.register_new_resolver("oc.env", env, replace=True)
        try:
            mark(conf, tree)
        finally:
            OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _take_no_effect(composed: Composed, tree: Tree) -> None:
    """Remove published keys that nothing reads, and say so once for each file that sets some."""
    ignored: dict[str, list[str]] = {}
    for path, row in no_effect_paths():
        source = composed.origin(path)
        if (value := take(tree, path)) is ABSENT:
            continue
        if row.only and not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in row.only):
            only = " or ".join(map(str, row.only))
            raise UserError(f"{source}: {path}={value} must be {only}, or left out: {row.why}")
        check_value(row.kind, value, path, composed.origin)
        if value not in (None, {}):
            ignored.setdefault(source, []).append(path)
    for source, paths in ignored.items():
        listed = ", ".join(paths[:6]) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")
        warn_once(source, f"{source}: no effect here, as docs/compat.md explains: {listed}")


def get(tree: Any, path: str) -> Any:
    """The node at a dotted path, or ABSENT."""
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return ABSENT
        tree = tree[key]
    return tree


def take(tree: Tree, path: str) -> Any:
    """Remove and return the node at a dotted path, or ABSENT."""
    parent, _, name = path.rpartition(".")
    block = get(tree, parent) if parent else tree
    return block.pop(name, ABSENT) if isinstance(block, dict) else ABSENT


def put(tree: Tree, path: str, value: Any) -> None:
    """Set a dotted path, making the blocks above it; a block is merged into a block that is there."""
    *parents, name = path.split(".")
    for parent in parents:
        if not isinstance(tree.get(parent), dict):
            tree[parent] = {}
        tree = tree[parent]
    old = tree.get(name)
    tree[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value


def merged(base: Tree, over: Tree) -> Tree:
    """`base` with the keys of `over` on top, block by block."""
    both = {
        k: merged(base[k], v) if isinstance(base.get(k), dict) and isinstance(v, dict) else v for k, v in over.items()
    }
    return {**base, **both}


def _register_old_groups(config_dir: Path) -> None:
    """Let Hydra find fragments under their old folders: `training_backend/fsdp@...`, `env/train: NAME`."""
    store = ConfigStore.instance()
    for old, new in OLD_GROUPS.items():
        for file in (config_dir / new).glob("*.yaml"):
            store.store(group=old, name=file.stem, node={"defaults": [f"/{new}/{file.stem}@_here_"]})


def _picks_fragment(override: str) -> bool:
    """Whether an override picks a fragment, such as `model@actor.model=pi0_5`, rather than setting a key."""
    key = override.partition("=")[0].lstrip("+~")
    return "@" in key or "/" in key


def _by_group(choices: Sequence[str], own: str) -> dict[str, str]:
    """Choices of fragments by what they choose, the last one winning; `env/train` is `env@env.train` in a file of ours.

    `own` is the text of the config, whose `defaults` may have the old name.
    """
    found = {}
    for choice in choices:
        key, _, name = choice.partition("=")
        folder, _, place = key.partition("/")
        if key in OLD_GROUPS and place and not re.search(rf"^ *- *(override )?{key}\b", own, re.M):
            key = f"{folder}@{folder}.{place}"
        found[key] = f"{key}={name}"
    return found


def _override(tree: Tree, command_line: Tree, override: str) -> None:
    """Set `a.b=value` (`+a.b` is the same) or delete `~a.b`; the value is YAML. What is set is also noted apart."""
    key, equals, text = override.partition("=")
    path = key.strip().lstrip("+~")
    if not path or not (equals or key.startswith("~")):
        raise UserError(
            f"{COMMAND_LINE}: {override!r} is not an override; write key=value, "
            "for example runner.max_steps=10, or ~key to remove a key"
        )
    if key.startswith("~"):
        if take(tree, path) is ABSENT:
            raise UserError(f"{COMMAND_LINE}: {override!r}: there is no key {path} to remove")
        return
    try:
        _check_aliases(f"value: {text}")
        value = _plain(OmegaConf.create(f"value: {text}"))["value"] if text.strip() else None
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{COMMAND_LINE}: {override!r}: {_one_line(error)}") from error
    except RecursionError:
        raise UserError(f"{COMMAND_LINE}: the value of {path}: {TOO_DEEP}") from None
    for name in rename_path(path):
        _replace_placement(tree, name)
        put(tree, name, value)
        put(command_line, name, value)


def _replace_placement(tree: Tree, path: str) -> None:
    """A new placement replaces the file's; a new place for one component takes it out of the file's lists."""
    if not path.startswith(PLACEMENT):
        return
    if get(tree, PLACEMENT) is ABSENT:
        tree.setdefault("cluster", {})["component_placement"] = dict(ClusterConfig().component_placement)
    placement = get(tree, PLACEMENT)
    if not isinstance(placement, dict):
        return
    split = {name.strip(): value for key, value in placement.items() for name in str(key).split(",")}
    placement.clear()
    if path != PLACEMENT:
        placement.update(split)


def _apply_aliases(composed: Composed) -> None:
    """Give old keys their new names. Old ones stay until values are resolved, because other keys may refer to them."""
    for old in RENAMED:
        value = get(composed.tree, old)
        if value is ABSENT:
            continue
        for new in rename_path(old):
            rank, present = composed.rank(new), get(composed.tree, new)
            if isinstance(value, dict) or composed.rank(old) > rank:
                put(composed.tree, new, value)
            elif composed.rank(old) == rank and present not in (value, f"${{{old}}}"):
                raise UserError(
                    f"{composed.origin(old)}: {old}={value!r} is the old name of {new}={present!r}; keep only {new}"
                )


def _split_pasted(file: Path) -> tuple[str, list[str], list[str]]:
    """The text of a config, and what was pasted from a guide: blocks that are named again, and choices of fragments.

    YAML itself allows a name only once, and Hydra lets `env/train: NAME` stand in `defaults` alone.
    """
    text = file.read_text(encoding="utf-8")
    root = _check_aliases(text)
    entries = root.value if isinstance(root, MappingNode) else []
    if not entries or not all(isinstance(key, ScalarNode) for key, _ in entries):
        return text, [], []  # nothing is named twice; what is wrong with it is said when it is read
    starts = [key.start_mark.index for key, _ in entries]
    own, pasted, picked, seen = text[: starts[0]] if starts else text, list[str](), list[str](), set[str]()
    for (key, value), start, end in zip(entries, starts, [*starts[1:], len(text)], strict=True):
        if key.value in OLD_GROUPS and isinstance(value, ScalarNode):
            picked.append(f"{key.value}={value.value}")
        elif key.value in seen and key.value not in ("defaults", "hydra"):
            pasted.append(text[start:end])
        else:
            own += text[start:end]
        seen.add(key.value)
    return own, pasted, picked


def _check_aliases(text: str) -> Node | None:
    """The nodes of a YAML text; YAMLError where its aliases, written out, would make more values than a config has."""
    root = compose_nodes(text, Loader=SafeLoader)
    sizes: dict[int, float] = {}

    def size(node: Node) -> float:
        """How many values a node holds once its aliases are written out; infinite where it holds itself."""
        if id(node) not in sizes:
            sizes[id(node)] = inf
            parts = node.value if isinstance(node, CollectionNode) else []
            inner = (n for part in parts for n in (part if isinstance(part, tuple) else (part,)))
            sizes[id(node)] = 1 + sum(map(size, inner))
        return sizes[id(node)]

    if root is not None and (total := size(root)) > MOST_VALUES:
        count = "without end" if total == inf else f"to {total:.3g} values"
        raise YAMLError(f"its aliases (&name, *name) expand {count}; {MOST_VALUES} are the most")
    return root


@contextmanager
def _file_for_hydra(file: Path, own: str, *, changed: bool) -> Iterator[Path]:
    """The file that Hydra reads: the config, or a copy of the part of it that is valid YAML."""
    if not changed:
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="rlinf-config-") as folder:
        copy = Path(folder) / file.name
        copy.write_text(own, encoding="utf-8")
        yield copy


def _take_last_placement(tree: Tree, layers: Sequence[Layer]) -> None:
    """A placement replaces those before it: merged, they would place a component twice."""
    given = [block for layer in layers if isinstance(block := get(layer.tree, PLACEMENT), dict)]
    if given:
        tree["cluster"]["component_placement"] = dict(given[-1])


def _mounted(text: str, package: str) -> Tree:
    """The own keys of a fragment's text, at the place where it is mounted."""
    content = {k: v for k, v in _plain(OmegaConf.create(text)).items() if k not in ("defaults", "hydra")}
    tree: Tree = {}
    if not package:
        return content
    put(tree, package, content)
    return tree


def _fragment(config_path: str, folders: Sequence[Path]) -> Path | None:
    """The file behind an entry of Hydra's defaults list; None for Hydra's own."""
    files = [folder / f"{config_path}.yaml" for folder in folders]
    return next((f for f in files if f.is_file()), None)


def _plain(conf: Any) -> Tree:
    tree: Any = OmegaConf.to_container(conf, resolve=False)
    return tree if isinstance(tree, dict) else {}


def _shown(path: Path) -> str:
    """A path as short as it can be said from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _one_line(error: object) -> str:
    """The message without OmegaConf's notes on its own types."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and line != "full_key:" and not line.startswith("object_type="))
