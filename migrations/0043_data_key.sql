-- What the keys of this schema are hashed with, wrapped by a secret that is not here (R39). Empty: SHA-256 without a secret.
-- {schema} is the configured schema.
alter table {schema}.hashing rename column secret to wrapped;
