#!/bin/sh
# Secrets come as files, settings as environment variables: for each variable NAME__FILE=/path this sets NAME to what the file holds,
# then becomes the command. So no secret stands in a compose file, in `docker inspect` or in a process's arguments.
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
