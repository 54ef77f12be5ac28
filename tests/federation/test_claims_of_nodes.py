"""Which nodes say that they are which client."""

from piecework.federation.claims import Claims


def test_claims_are_found_both_ways() -> None:
    claims = Claims()
    assert claims.add(10, 0) == []
    assert claims.add(11, 1) == []
    assert claims.add(12, 0) == [10]
    assert claims.add(13, 0) == [10, 12]
    assert claims.add(10, 1) == [11]  # it claims another now, and no longer the first
    assert claims.add(14, 0) == [12, 13]
    claims.drop(12)
    claims.drop(12)
    claims.keep({13, 10})
    assert claims.add(15, 0) == [13]
    assert claims.add(16, 1) == [10]
