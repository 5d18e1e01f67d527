#!/usr/bin/env bash
# Makes the image that `bench/run unpack` loads: a Debian root file system with compilers and Python as one gzip layer,
# in an archive that is an OCI layout and what `docker load` reads at once. unpack-image.sh FILE; kept when it is there.
set -euo pipefail
file=$(realpath -m "$1")
[ -s "$file" ] && exit
command -v mmdebstrap >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq mmdebstrap >/dev/null
work=$(mktemp -d "$(dirname "$file")/unpack-image.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
mmdebstrap --quiet --variant=minbase --include=python3,perl,git,ca-certificates,gcc bookworm root.tar
blobs=layout/blobs/sha256
mkdir -p $blobs
digest() { sha256sum "$1" | cut -d' ' -f1; }
diff_id=$(digest root.tar)
# As `docker push` and buildkit compress.
gzip -6 -n root.tar
layer=$(digest root.tar.gz)
size() { stat -c %s "$1"; }
mv root.tar.gz "$blobs/$layer"
arch=$(dpkg --print-architecture)
printf '{"architecture":"%s","os":"linux","config":{"Cmd":["/bin/bash"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
  "$arch" "$diff_id" >config
config=$(digest config)
mv config "$blobs/$config"
oci=application/vnd.oci.image
printf '{"schemaVersion":2,"mediaType":"%s.manifest.v1+json","config":{"mediaType":"%s.config.v1+json","digest":"sha256:%s","size":%s},"layers":[{"mediaType":"%s.layer.v1.tar+gzip","digest":"sha256:%s","size":%s}]}' \
  $oci $oci "$config" "$(size "$blobs/$config")" $oci "$layer" "$(size "$blobs/$layer")" >manifest
manifest=$(digest manifest)
mv manifest "$blobs/$manifest"
printf '{"schemaVersion":2,"manifests":[{"mediaType":"%s.manifest.v1+json","digest":"sha256:%s","size":%s,"annotations":{"org.opencontainers.image.ref.name":"bench-unpack:latest","io.containerd.image.name":"docker.io/library/bench-unpack:latest"}}]}' \
  $oci "$manifest" "$(size "$blobs/$manifest")" >layout/index.json
printf '{"imageLayoutVersion":"1.0.0"}' >layout/oci-layout
printf '[{"Config":"blobs/sha256/%s","RepoTags":["bench-unpack:latest"],"Layers":["blobs/sha256/%s"]}]' \
  "$config" "$layer" >layout/manifest.json
tar -C layout -cf "$file.part" oci-layout index.json manifest.json blobs
mv "$file.part" "$file"
