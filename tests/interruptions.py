"""A prune that is interrupted at its second block, wherever a test wants it to be."""


def interrupt_at_second_block(monkeypatch, owner, name: str) -> list[str]:
    """Has a function fail at its second call, once. Returns the names of the blocks that it was called for.

    Args:
        monkeypatch: of pytest; afterwards everything is as it was.
        owner: a module or a class.
        name (`str`): of its function, whose second positional argument is the block.
    """
    called, original = [], getattr(owner, name)

    def interrupted(first, block, *args):
        called.append(block.name)
        if len(called) == 2:
            raise ConnectionError
        return original(first, block, *args)

    monkeypatch.setattr(owner, name, interrupted)
    return called
