"""Keys, and the order in which idle logical pages go."""

from __future__ import annotations

from diffserve.runtime.kv.ledger import LogicalPage, PrefixIndex, next_key, root_key, salt_of


def test_equal_keys_need_equal_tokens_all_the_way_back() -> None:
    root = root_key(b"model", 0, b"")
    first, other = next_key(root, [1, 2]), next_key(root, [1, 3])
    assert next_key(first, [4, 5]) != next_key(other, [4, 5])
    assert next_key(first, (4, 5)) == next_key(next_key(root, range(1, 3)), [4, 5])


def test_part_of_a_page_has_another_key_than_the_page() -> None:
    root = root_key(b"model", 0, b"")
    assert next_key(root, [1]) != next_key(root, [1, 0])


def test_roots_differ_by_model_epoch_and_salt() -> None:
    roots = {root_key(m, e, s) for m in (b"a", b"b") for e in (0, 1) for s in (b"", b"key")}
    assert len(roots) == 8


def test_salts_of_different_lists_of_parts_differ() -> None:
    lists = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc")]
    assert len({salt_of(*parts) for parts in lists}) == len(lists)


def test_no_parts_are_the_shared_salt() -> None:
    assert salt_of() == salt_of(b"", b"") == b""


def test_the_longest_idle_page_goes_first_and_use_renews() -> None:
    index = PrefixIndex()
    logical_pages = [LogicalPage("llm", (page,)) for page in range(3)]
    for logical in logical_pages:
        index.file(bytes(logical.pages), logical)
        index.mark_idle(logical)
    index.mark_held(logical_pages[0])
    assert index.oldest_idle() is logical_pages[1]
    index.mark_idle(logical_pages[0])
    assert [logical.pages for logical in index.idle] == [(1,), (2,), (0,)]


def test_a_withdrawn_page_is_found_no_more() -> None:
    index = PrefixIndex()
    logical = LogicalPage("llm", (0,))
    index.file(b"key", logical)
    assert index.find(b"key") is logical
    index.withdraw(logical)
    assert (index.find(b"key"), logical.key, len(index)) == (None, None, 0)
