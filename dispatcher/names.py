"""What handles are called. A name says whose it is, so that nobody can take, or ask after, another's.

A request may bring the recipe of a handle that is gone, also to a dispatcher that never knew it. Whether it
is built again under its name must not depend on what other tenants have, or had: so the name itself decides.
It is a mark that cannot be guessed and a digest of the mark and the tenant. So a name is one tenant's, also
to a dispatcher that was restarted, and nothing has to be remembered. Who is told the name of a shared handle
can check a guess at its tenant's name, and nothing more. This file must not know the book of handles.
"""

from __future__ import annotations

import hashlib
import secrets

DIGEST = 12  # characters


def mark() -> str:
    """Whoever knows it was told."""
    return secrets.token_hex(14)


def name(mark: str, tenant: str) -> str:
    """Of a new handle of that tenant."""
    digest = hashlib.sha256(f"{mark} {tenant}".encode()).hexdigest()
    return f"{mark}-{digest[:DIGEST]}"


def belongs(handle: str, tenant: str) -> bool:
    """Whether that is a name of this tenant's, whether or not there is such a handle."""
    return handle == name(handle[: -DIGEST - 1], tenant)
