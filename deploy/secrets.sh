#!/bin/sh
# Creates the secrets that deploy/compose.yaml passes to its containers. Existing ones are kept.
#   deploy/secrets.sh [DIRECTORY]
set -eu
directory=${1:-"$(dirname "$0")/secrets"}
umask 077
mkdir -p "$directory"
chmod 700 "$directory" # closed to other users of this machine; the files in it are readable by each container's user

make() {
  [ -e "$directory/$1" ] || printf '%s' "$2" > "$directory/$1"
  chmod 644 "$directory/$1"
}

random() {
  od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}

make gateway-token "$(random)"
make postgres-password "$(random)"
make nats-password "$(random)"
make nats-auth.conf "authorization { user: antiphon, password: \"$(cat "$directory/nats-password")\" }
"
make nats-route-password "$(random)"
route=$(cat "$directory/nats-route-password")
make nats-routes.conf "authorization { user: route, password: \"$route\" }
routes: [
  \"nats://route:$route@nats-0.nats:6222\"
  \"nats://route:$route@nats-1.nats:6222\"
  \"nats://route:$route@nats-2.nats:6222\"
]
"
echo "The secrets are in $directory. Clients need gateway-token."
