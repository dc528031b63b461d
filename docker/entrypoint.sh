#!/bin/sh
# Secrets are passed as files, settings as environment variables. For each variable NAME__FILE=/path, this script sets NAME to the
# contents of the file, and then runs the command. No secret therefore appears in a compose file, in `docker inspect` or on a command line.
set -eu

for name in $(env | sed -n 's/^\(SHOAL_[A-Z0-9_]*\)__FILE=.*/\1/p'); do
    eval "path=\${${name}__FILE}"
    if ! value=$(cat "$path"); then
        echo "${name}__FILE=${path} cannot be read: mount the secret there, readable for user $(id -u)" >&2
        exit 1
    fi
    export "${name}=${value}"
    unset "${name}__FILE"
done

exec "$@"
