"""``symbiosis keys``: key pairs for ``tcp://`` and ``dist://``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from symbiosis.errors import UsageError
from symbiosis.terminal.console import console

app = typer.Typer(no_args_is_help=True, help="Make and list the keys of tenants, for tcp:// and dist:// addresses.")

FolderOption = Annotated[Path, typer.Option("--keys", help="The provider's key folder.")]


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The tenant's name.", show_default=False)],
    keys: FolderOption = Path("keys"),
    secret: Annotated[
        Path | None, typer.Option(help="Where to write the secret key (default: NAME.secret here).", show_default=False)
    ] = None,
) -> None:
    """Make a tenant's key pair: the public key stays in the provider's folder, the secret key is for the tenant.

    The first time, the executor's own pair is made as well. Tenants are admitted and locked out without a restart.

    Example: symbiosis keys new alice --keys keys/
    """
    from symbiosis.transports.keys import SERVER, check_key_name, new_key

    check_key_name(name)
    target = secret or Path(f"{name}.secret")
    if target.exists():
        raise UsageError(f"{target} exists; remove it to replace the key, or give another --secret")
    out = console()
    if not (keys / f"{SERVER}.secret").exists():
        new_key(keys, SERVER)
        out.print(f"made the executor's own key in {escape(str(keys))}")
    made = new_key(keys, name)
    if made.resolve() != target.resolve():
        content = made.read_text()
        try:
            target.touch(mode=0o600, exist_ok=False)
            target.write_text(content)
        except OSError as error:
            raise UsageError(f"cannot write {target} ({error.strerror}); the secret key is in {made}") from error
        made.unlink()
    out.print(f"{escape(str(target))}: for {escape(name)} alone; connect with --key {escape(str(target))}")
    out.print(f"{escape(str(keys / f'{name}.public'))}: admits {escape(name)}; delete it to lock {escape(name)} out")


@app.command("list")
def list_keys(keys: FolderOption = Path("keys")) -> None:
    """List the tenants that are admitted, and the key files that do not count."""
    from symbiosis.transports.keys import Keyring

    ring = Keyring(keys)
    names = sorted(ring.names().values())
    for file, problem in ring.broken.items():
        console(stderr=True).print(f"{escape(file)} is ignored: {escape(problem)}", soft_wrap=True)
    if not names:
        raise UsageError(f"{keys} has no keys of tenants; make one with `symbiosis keys new NAME --keys {keys}`")
    for name in names:
        console().print(escape(name))
