"""Databases that cannot be used: every command reports them in one sentence with the address and the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from diffserve.api.errors import ConfigError
from diffserve.cli import main
from diffserve.store import Database
from diffserve.store.errors import StoreError, store_errors
from tests.postgresql import PASSWORD, USER, PostgreSQL

DOWN = f"postgresql://user:{PASSWORD}@127.0.0.1:1/name"
RIGHTS = "grant its role the rights on the schema and all tables, or make it their owner."
SIGN_IN = "correct user and password in store.url, or let the user in (pg_hba.conf)."


def run_sql(folder: Path, url: str, *statements: str) -> str:
    """Run statements in a database that diffserve has created, and return its address."""
    database = Database(folder, url)
    with database.writing() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    database.close()
    return url


def as_role(url: str, role: str) -> str:
    return url.replace(f"//{USER}:", f"//{role}:")


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run a command with a database; return its exit code and the last line of its output and errors."""

    def run(url: str, *words: str) -> tuple[int, str]:
        monkeypatch.setenv("DIFFSERVE_STORE_URL", url)
        monkeypatch.setenv("DIFFSERVE_SERVE_DATA_DIR", str(tmp_path))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(words)
        captured = capsys.readouterr()
        assert PASSWORD not in captured.out + captured.err
        assert captured.err.count("\n") <= 1
        return int(ended.value.code or 0), (captured.err or captured.out).splitlines()[-1]

    return run


def test_a_role_that_may_only_read_is_reported_with_the_address_and_the_fix(
    postgresql: PostgreSQL, tmp_path: Path, refused: Callable[..., tuple[int, str]], tiny_model: Callable[[str], Path]
) -> None:
    url = run_sql(
        tmp_path,
        postgresql.create_database(),
        "CREATE ROLE weak LOGIN",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO weak",
    )
    shown = as_role(url, "weak").replace(PASSWORD, "***")
    for command in (["keys", "add", "app"], ["serve", "--model", "embedded", "--port", "0"]):
        code, line = refused(as_role(url, "weak"), *command)
        assert (code, line.partition(" cannot be used (permission denied for table ")[0]) == (2, f"diffserve: {shown}")
        assert line.endswith(f"); {RIGHTS}")
    code, line = refused(as_role(url, "weak"), "doctor", "--model", str(tiny_model("sd15")), "--device", "cpu")
    assert (code, line) == (1, f"store.url: {shown} cannot be used (permission denied for table secrets); {RIGHTS}")


def test_doctor_names_the_key_of_the_database(
    postgresql: PostgreSQL, tmp_path: Path, refused: Callable[..., tuple[int, str]], tiny_model: Callable[[str], Path]
) -> None:
    newer = run_sql(tmp_path, postgresql.create_database(), "UPDATE alembic_version SET version_num = '9999'")
    for url, problem in ((DOWN, "cannot be used"), (newer, "was written by a newer diffserve")):
        code, line = refused(url, "doctor", "--model", str(tiny_model("sd15")), "--device", "cpu")
        assert (code, line.startswith("store.url: postgresql://"), problem in line) == (1, True, True)


def test_the_fix_fits_the_error(postgresql: PostgreSQL, tmp_path: Path) -> None:
    url = run_sql(tmp_path, postgresql.create_database(), "CREATE ROLE poor LOGIN", "CREATE ROLE group_only")
    foreign = run_sql(tmp_path, postgresql.create_database(), "DROP TABLE alembic_version")
    for address, text, fix in (
        (DOWN, "Connection refused", "start the database or change store.url."),
        (postgresql.url("none"), 'database "none" does not exist', "create the database or change store.url."),
        (as_role(url, "nobody"), 'role "nobody" does not exist', SIGN_IN),
        (as_role(url, "group_only"), 'role "group_only" is not permitted to log in', SIGN_IN),
        (as_role(url, "poor"), "permission denied for table alembic_version", RIGHTS),
        (foreign, "already exists", "it belongs to another program: choose an empty database (store.url)."),
    ):
        with pytest.raises(ConfigError) as error:
            Database(tmp_path, address)
        assert (text in error.value.message, error.value.param) == (True, "url")
        assert error.value.message.endswith(f"); {fix}")


@pytest.mark.parametrize(
    "text",
    [
        'FATAL:  password authentication failed for user "a"',
        "fe_sendauth: no password supplied",
        'FATAL:  no pg_hba.conf entry for host "::1", user "a", database "name", no encryption',
    ],
)
def test_a_wrong_password_is_named_as_such(text: str) -> None:
    with pytest.raises(StoreError) as error, store_errors("postgresql://a:***@host/name"):
        raise OperationalError("", None, Exception(f'connection to server at "::1", port 5432 failed: {text}'))
    assert (error.value.reason, error.value.message.endswith(f"{text}); {SIGN_IN}")) == ("unreachable", True)


def test_a_full_disk_is_no_reason_to_move_an_sqlite_file_away(tmp_path: Path) -> None:
    database = Database(tmp_path)
    with database.writing() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
        with pytest.raises(StoreError) as error, store_errors(str(database.file)):
            connection.exec_driver_sql("CREATE TABLE large AS SELECT zeroblob(10000000) AS value")
    assert error.value.message == f"{database.file} cannot be used (database or disk is full); free space on its disk."


def test_no_free_connection_means_unreachable() -> None:
    with pytest.raises(StoreError) as error, store_errors("postgresql://host/name"):
        raise PoolTimeout("QueuePool limit reached")
    assert error.value.reason == "unreachable"
