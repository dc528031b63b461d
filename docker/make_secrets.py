"""Creates the secrets that compose.yaml mounts, in docker/secrets/. `make secrets` runs it once per
cluster. Existing secrets are never overwritten.

    tokens             table of tokens for the coordinator and servers, lines of `role: token`
    admin_token, worker_token, server_token, viewer_token, reader_token
    redis_acl          users of Redis, with hashes of their passwords
    redis_url          URL of Redis for the coordinator, with its password
    redis_worker_url   URL of Redis for workers, who may access their rendezvous stores but no keys
                       of the coordinator
    grafana_password   password of Grafana's user admin

Compose mounts secret files with the permissions they have on the host, but the users in containers
differ from those of the host. The files are therefore readable by everyone, and the folder only by
its owner.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "secrets"
ROLES = ("admin", "worker", "server", "viewer", "reader")

# Keys and channels of shoal_worker.store: those of generations, and of init_method="redis://".
STORES = ("shoal:{*}:store:*", "shoal:{*}:group:*", "shoal:{*}:rendezvous*")


def make(folder: Path) -> bool:
    """Writes all secrets into `folder`. Returns False if the folder already exists. The folder is
    written under another name and then renamed, so it is never incomplete."""
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
        # Without a password, only PING is allowed, for the health check.
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
    print(f"{FOLDER}: {'written' if made else 'already exists, left unchanged'}")


if __name__ == "__main__":
    main()
