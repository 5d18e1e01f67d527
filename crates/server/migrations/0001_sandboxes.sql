-- Times are microseconds since the Unix epoch; maps and lists are JSON.
CREATE TABLE sandboxes (
    id             TEXT    NOT NULL PRIMARY KEY,
    created_at     INTEGER NOT NULL,
    image          TEXT    NOT NULL,
    platform       TEXT,
    entrypoint     TEXT    NOT NULL,
    extensions     TEXT    NOT NULL,
    limits         TEXT    NOT NULL,
    endpoint_token TEXT,
    handle         TEXT    NOT NULL,
    metadata       TEXT    NOT NULL,
    expires_at     INTEGER,
    state          TEXT    NOT NULL,
    reason         TEXT    NOT NULL,
    message        TEXT    NOT NULL,
    since          INTEGER NOT NULL,
    exit_code      INTEGER
) STRICT, WITHOUT ROWID;
