"""Apply vLLM's KV events to an index of the prefixes that an engine has cached.

The engine's block hashes are opaque: they depend on its version, seed and settings. Our keys are
chained over the tokens in the events, so they can be computed for a tokenised prompt too.
"""

from array import array
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay.proxy.core.learn.engine_blocks import EngineBlocks, Tail

ROOT = 0  # parent of the first block
NO_COPY = (ROOT, 0)  # entry of a block that a group does not hold
MOST_BLOCKS = 1 << 22  # bound for one engine: no GPU holds so many
# In the order of vLLM's classes; newer versions append fields.
OLD_STORED = (
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
OLD_REMOVED = ("type", "block_hashes", "medium", "group_idx")
WHOLE_PROMPT = ("full_attention", "mla_attention", "sink_full_attention")
"""Kinds of layer groups that keep every block of a prompt. The others (sliding windows, Mamba) keep
its end or a state, so they only say where in a prompt the engine can resume."""
WINDOWS = ("sliding_window", "sliding_window_mla")


class BadEvent(Exception):
    """An event cannot be parsed, or contradicts earlier events."""


class NoSalt(BadEvent):
    """The first block of a prompt comes without its salt, so its tenant is unknown."""


def chain_keys(
    token_ids: Sequence[int],
    block_size: int,
    parent: int = ROOT,
    extra_keys: Sequence[Any] = (),
) -> list[int]:
    """Return the keys of the full blocks, chained to `parent`.

    Raises OverflowError or TypeError for values that are no token ids.

    Args:
        extra_keys: values of each block, such as a salt, that distinguish equal tokens.
    """
    data, width = array("I", token_ids).tobytes(), 4 * block_size
    keys = []
    for index, start in enumerate(range(0, len(data) - width + 1, width)):
        block = data[start : start + width]
        if index < len(extra_keys) and extra_keys[index]:
            block += repr(list(extra_keys[index])).encode()
        parent = xxh3_64_intdigest(block, parent)
        keys.append(parent)
    return keys


class KvBlocks:
    """The cached blocks of one engine by its own hashes. Keeps the index `held` up to date.

    A hybrid model has several groups of layers, and an event is about a single group. A block is
    held when each group that keeps whole prompts holds it. The engine chains its hashes over the
    whole prompt, so equal hashes in two groups mean blocks that end at the same token. Thus a block
    of another group gets the key of the block with its hash.

    Attributes:
        salted: every prompt is sent with a salt, so events without salts are useless.
    """

    def __init__(self, held: EngineBlocks, *, salted: bool = False) -> None:
        self.held = held
        self.salted = salted
        # By group that keeps whole prompts; the engine's hash: [key, number of copies].
        self._groups: dict[int, dict[Any, list[int]]] = {}
        self._others: set[int] = set()  # groups of other kinds
        # By such a group; its keys by the engine's hash. None: the group cannot be followed.
        self._tails: dict[int, tuple[Tail, dict[Any, int]] | None] = {}

    @property
    def hybrid(self) -> bool:
        """True if there are groups of layers that do not keep whole prompts."""
        return bool(self._others)

    def clear(self, *, complete: bool) -> None:
        """Clear the index: the cache is empty (`complete`), or its contents are unknown."""
        self._groups.clear()
        self._others.clear()
        self._tails.clear()
        self.held.cleared(complete=complete)

    def apply(self, events: Sequence[Any]) -> None:
        """Apply one batch in order. Raises BadEvent."""
        later: list[dict[str, Any]] = []
        try:
            for fields in map(_fields, events):
                # Tiers below the GPU do not decide whether a prompt is cached.
                if fields.get("medium") not in (None, "GPU"):
                    continue
                match fields["type"]:
                    case "BlockStored":
                        if (group := self._group_stored(fields)) is not None:
                            self._stored(fields, group)
                        else:
                            later.append(fields)
                    case "BlockRemoved" if (fields.get("group_idx") or 0) in self._others:
                        later.append(fields)
                    case "BlockRemoved":
                        self._removed(fields)
                    case "AllBlocksCleared":
                        self.clear(complete=True)
                        later.clear()
            # The keys of these blocks come from groups whose events may follow in the batch.
            for fields in later:
                self._change_tail(fields)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise BadEvent(f"{type(error).__name__} in a KV event") from error
        except OverflowError as error:
            raise BadEvent("a token id beyond 32 bits in a KV event") from error

    def _group_stored(self, fields: dict[str, Any]) -> dict[Any, list[int]] | None:
        """Return the blocks of the event's group, or None if the group does not count.

        Versions whose events have no kinds put full attention in group 0.
        """
        number = fields.get("group_idx") or 0
        if number in self._groups:
            return self._groups[number]
        kind, size = fields.get("kv_cache_spec_kind"), fields["block_size"]
        counts = not number if kind is None else kind in WHOLE_PROMPT
        # Compressed attention has larger blocks. The first group counts for all.
        if not counts or (self._groups and size != self.held.translations.block_size):
            self._others.add(number)
            return None
        # The new group holds none of the blocks that the others do.
        for group in [*self._groups.values()][:1]:
            for block_hash, (key, _) in group.items():
                self.held.removed([key] * self._copies(block_hash))
        return self._groups.setdefault(number, {})

    def _change_tail(self, fields: dict[str, Any]) -> None:
        """Apply an event of a group that does not keep whole prompts, if it can be followed."""
        number = fields.get("group_idx") or 0
        pair = self._tails[number] if number in self._tails else self._new_tail(number, fields)
        if pair is None:
            return
        tail, keys = pair
        for block_hash in fields["block_hashes"]:
            if fields["type"] == "BlockRemoved":
                if (key := keys.get(block_hash)) is not None and tail.removed(key):
                    del keys[block_hash]
                continue
            key = next(iter(self._groups.values())).get(block_hash, NO_COPY)[0]
            if key != ROOT:
                tail.stored(keys.setdefault(block_hash, key))
            elif self.held.complete:
                # Its hashes differ from the hashes of the other groups: it is no longer followed.
                self._tails[number] = None
                self.held.tails.remove(tail)
                return

    def _new_tail(self, number: int, fields: dict[str, Any]) -> tuple[Tail, dict[Any, int]] | None:
        """Start to follow the group of an event. Returns None if it cannot be followed."""
        if not self._groups or fields["type"] == "BlockRemoved":
            return None  # it may be followed later
        kind, window = fields.get("kv_cache_spec_kind"), fields.get("kv_cache_spec_sliding_window")
        size, unit = fields["block_size"], self.held.translations.block_size
        needed = 0
        if kind == "mamba":
            needed = 1  # the block that has the state at its end
        elif kind in WINDOWS and window:
            needed = max(1, -(-(window - 1) // max(1, size)))  # the next token is in the window too
        if not needed or size < 1 or size % unit:
            self._tails[number] = None
            return None
        tail = Tail(needed, size // unit)
        self.held.tails.append(tail)
        return self._tails.setdefault(number, (tail, {}))

    def _copies(self, block_hash: Any) -> int:
        """Return the number of copies of a block that every group holds."""
        return min(group.get(block_hash, NO_COPY)[1] for group in self._groups.values())

    def _stored(self, fields: dict[str, Any], group: dict[Any, list[int]]) -> None:
        size, parent = fields["block_size"], fields["parent_block_hash"]
        # [None, ...] is fine: the prompt of another client, sent without a salt.
        if parent is None and self.salted and not fields.get("extra_keys"):
            raise NoSalt("its KV events have no cache salts (those of vLLM 0.20 and newer do)")
        self._check_size(size)
        if parent is not None and parent not in group:
            if self.held.complete:
                raise BadEvent("a block after one that was never stored")
            return  # its parent was stored before we followed
        before = ROOT if parent is None else group[parent][0]
        extra = fields.get("extra_keys") or ()
        hashes = fields["block_hashes"]
        keys, stored = chain_keys(fields["token_ids"], size, before, extra), []
        for block_hash, key in zip(hashes, keys, strict=True):
            entry = group.setdefault(block_hash, [key, 0])
            entry[1] += 1
            if self._copies(block_hash) == entry[1]:
                stored.append(key)
        self.held.stored(stored)

    def _check_size(self, size: Any) -> None:
        """Raise BadEvent for blocks of another size than before, or too many of them."""
        if not isinstance(size, int) or size < 1:
            raise BadEvent(f"blocks of {size!r} tokens")
        held = sum(len(group) for group in self._groups.values())
        held += sum(len(pair[1]) for pair in self._tails.values() if pair)
        if held > MOST_BLOCKS:
            raise BadEvent(f"more than {MOST_BLOCKS} blocks held")
        translations = self.held.translations
        if not translations.block_size:
            translations.block_size = size
        if size != translations.block_size:
            raise BadEvent(f"blocks of {size} tokens, other engines have {translations.block_size}")

    def _removed(self, fields: dict[str, Any]) -> None:
        number = fields.get("group_idx") or 0
        group = self._groups.get(number, {})
        if number and not group:
            return  # the event does not name the kind of its group
        keys = []
        for block_hash in fields["block_hashes"]:
            entry = group.get(block_hash)
            if entry is None:
                if self.held.complete:
                    raise BadEvent("a block removed that was never stored")
                continue
            if self._copies(block_hash) == entry[1]:
                keys.append(entry[0])
            entry[1] -= 1
            if not entry[1]:
                del group[block_hash]
        self.held.removed(keys)


def _fields(event: Any) -> dict[str, Any]:
    """Return an event as a mapping. Up to vLLM 0.2x it is a list that begins with its type."""
    if isinstance(event, dict):
        return event
    names = OLD_STORED if event[0] == "BlockStored" else OLD_REMOVED
    return dict(zip(names, event, strict=False))
