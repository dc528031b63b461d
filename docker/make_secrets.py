"""Makes the secrets that compose.yaml mounts, in docker/secrets/: run once per cluster, by
`make secrets`. Never overwrites one.

    tokens             the coordinator's and servers' table, `role: token` lines
    admin_token, worker_token, server_token, viewer_token, reader_token
    redis_acl          users of Redis; only their passwords' hashes
    redis_url          the coordinator's, with its password
    redis_worker_url   the workers', who reach their rendezvous stores and nothing of the
                       coordinator's
    grafana_password   of Grafana's user admin

Compose mounts file secrets with the modes they have on the host, and the containers' users are not
the host's; so the files are readable by all and the folder that holds them by its owner alone.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "secrets"
ROLES = ("admin", "worker", "server", "viewer", "reader")

# Keys and channels of shoal_worker.store: a generation's, and those of init_method="redis://".
STORES = ("shoal:{*}:store:*", "shoal:{*}:group:*", "shoal:{*}:rendezvous*")


def make(folder: Path) -> bool:
    """Writes all secrets into `folder`; False when they are there already. A half-written folder
    cannot be: it is renamed into place."""
    if folder.exists():
        return False
    staged = folder.with_name(f"{folder.name}.new-{secrets.token_hex(4)}")
    staged.mkdir(mode=0o700, parents=True)
    for name, text in _contents().items():
        path = staged / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o444)
    staged.rename(folder)
    return True


def _contents() -> dict[str, str]:
    tokens = {role: secrets.token_urlsafe(32) for role in ROLES}
    passwords = {user: secrets.token_urlsafe(32) for user in ("shoal", "worker")}
    hashes = {
        user: hashlib.sha256(password.encode()).hexdigest() for user, password in passwords.items()
    }
    stores = " ".join(
        (*(f"~{store}" for store in STORES), *(f"&{store}" for store in STORES), "&shoal:wakeups:*")
    )
    return {
        "tokens": "".join(f"{role}: {token}\n" for role, token in tokens.items()),
        **{f"{role}_token": token for role, token in tokens.items()},
        # Without a password: PING, for the health check, and nothing else.
        "redis_acl": "user default on nopass resetkeys resetchannels -@all +ping\n"
        f"user shoal on #{hashes['shoal']} ~* &* +@all\n"
        f"user worker on #{hashes['worker']} resetkeys resetchannels {stores} +@all -@admin "
        "-@dangerous\n",
        "redis_url": f"redis://shoal:{passwords['shoal']}@redis:6379/0",
        "redis_worker_url": f"redis://worker:{passwords['worker']}@redis:6379/0",
        "grafana_password": secrets.token_urlsafe(16),
    }


def main() -> None:
    made = make(FOLDER)
    print(f"{FOLDER}: {'written' if made else 'there already, left as it is'}")


if __name__ == "__main__":
    main()
