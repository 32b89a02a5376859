"""Compute the metrics of ZeroSCROLLS for one answer and its references, as its scorer does.

Source of all formulas: the metrics folder of the data set tau/zero_scrolls (Shaham et al., Findings
of EMNLP 2023), which calls rouge-score without stemming and lifelines. One difference: for F1 it
writes any script in ASCII letters (Unidecode); here only Latin letters lose their accents.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import comb

METRICS = {
    "gov_report": "rouge",
    "summ_screen_fd": "rouge",
    "qmsum": "rouge",
    "squality": "rouge",
    "qasper": "f1",
    "narrative_qa": "f1",
    "musique": "f1",
    "quality": "accuracy",
    "space_digest": "exponential_similarity",
    "book_sum_sort": "concordance_index",
}
"""The metric of each task of ZeroSCROLLS."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Letters that Unicode does not take apart into a plain letter and an accent.
_LATIN = str.maketrans(
    {"ø": "o", "æ": "ae", "œ": "oe", "ß": "ss", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"}
)


def rouge(answer: str, references: Sequence[str]) -> tuple[float, float, float]:
    """Return the F-measures (0 to 1) of ROUGE-1, ROUGE-2 and ROUGE-L, each with its best reference.

    A task's score is the geometric mean of the three means over its answers.
    """
    words = _rouge_words(answer)
    each = [_rouge(words, _rouge_words(reference)) for reference in references]
    first, second, longest = zip(*each, strict=True)
    return max(first), max(second), max(longest)


def f1(answer: str, reference: str) -> float:
    """Return the F-measure of the words that both texts have, regardless of order."""
    return _shared_words(_plain_words(answer), _plain_words(reference))


def accuracy(answer: str, reference: str) -> float:
    """Return 1 if the first letter A to D that stands alone is the same, else 0."""
    said, right = (re.search(r"\b[A-D]\b", text) for text in (answer, reference))
    if right is None:
        raise ValueError(f"the reference {reference!r} names none of A, B, C and D")
    return float(said is not None and said.group() == right.group())


def exponential_similarity(answer: str, reference: str) -> float:
    """Return 0.5 to the power of the distance of the first percentages, in steps of 10 points."""
    said, right = (re.search(r"(\d+\.?\d*)%", text) for text in (answer, reference))
    if right is None:
        raise ValueError(f"the reference {reference!r} has no percentage")
    if said is None:
        return 0.0
    return float(0.5 ** (abs(float(said[1]) - float(right[1])) / 10))


def concordance_index(answer: str, reference: str) -> float:
    """Return the share of pairs that both lists of numbers have in the same order.

    It is 0 unless the answer has exactly the numbers of the reference.
    """
    said, right = (
        [number.lstrip("0") for number in re.sub(r"[^0-9\s,]", "", text).replace(",", " ").split()]
        for text in (answer, reference)
    )
    if len(right) < 2 or len(set(right)) < len(right):
        raise ValueError(f"the reference {reference!r} is not an order of two or more numbers")
    if sorted(said) != sorted(right):
        return 0.0
    place = {number: at for at, number in enumerate(right)}
    order = [place[number] for number in said]
    in_order = sum(earlier < later for at, earlier in enumerate(order) for later in order[at + 1 :])
    return in_order / comb(len(order), 2)


PAIRWISE: dict[str, Callable[[str, str], float]] = {
    "f1": f1,
    "accuracy": accuracy,
    "exponential_similarity": exponential_similarity,
    "concordance_index": concordance_index,
}
"""Metrics of one answer and one reference, 0 to 1. The best reference counts."""


def _rouge_words(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())


def _rouge(said: list[str], right: list[str]) -> tuple[float, float, float]:
    pairs = [list(pairwise(words)) for words in (said, right)]
    common = _longest_common_subsequence(said, right)
    return (
        _shared_words(said, right),
        _shared_words(*pairs),
        _f_measure(common, len(said), len(right)),
    )


def _plain_words(text: str) -> list[str]:
    lower = text.lower().translate(_NO_PUNCTUATION)
    plain = re.sub(r"\b(a|an|the)\b", " ", lower).translate(_LATIN)
    spread = unicodedata.normalize("NFKD", plain)
    return "".join(letter for letter in spread if not unicodedata.combining(letter)).split()


def _shared_words(said: Sequence[object], right: Sequence[object]) -> float:
    return _f_measure((Counter(said) & Counter(right)).total(), len(said), len(right))


def _f_measure(shared: int, said: int, right: int) -> float:
    """Return the harmonic mean of precision and recall."""
    return 2 * shared / (said + right) if shared else 0.0


def _longest_common_subsequence(words: Sequence[str], other: Sequence[str]) -> int:
    """Return its length, with a bit for each of `words` (Hyyro, 2004): summaries are long."""
    places: dict[str, int] = {}
    for at, word in enumerate(words):
        places[word] = places.get(word, 0) | 1 << at
    ones = left = (1 << len(words)) - 1
    for word in other:
        matched = left & places.get(word, 0)
        left = ((left + matched) | (left - matched)) & ones
    return len(words) - left.bit_count()
