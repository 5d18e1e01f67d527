//! Which stored image a name means, and what a registry would be asked for when none is.

use std::sync::Arc;

use osb_engine::image::{Error, Image, ImageStore, Reference};
use osb_runtime::{CreateError, FetchError, ImageSource, Platform};

use crate::told;

/// When a registry is asked for an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PullPolicy {
    /// When the image is not stored.
    #[default]
    IfNotPresent,
    /// Each time.
    Always,
    /// Never.
    Never,
}

/// Registry of names that name none, unless the settings say otherwise.
pub(crate) const DOCKER_HUB: &str = "docker.io";
/// Aliases that may lead from one to the next.
const MOST_ALIASES: usize = 8;
/// What to do about an image that is nowhere.
const LOAD_IT: &str = "load it with `osb image load PATH --name NAME`, or use the built-in image 'host'";

/// How names are read.
#[derive(Debug, Clone)]
pub(crate) struct Naming {
    pub(crate) policy: PullPolicy,
    pub(crate) default_registry: String,
}

impl Naming {
    /// The stored image to use; `None` when a registry is to be asked.
    pub(crate) fn find(
        &self,
        store: &ImageStore,
        source: &ImageSource,
    ) -> Result<Option<Arc<Image>>, CreateError> {
        let image = self.stored(store, &source.name)?;
        match (image, self.policy) {
            (Some(image), policy)
                if is_for(&image, source.platform.as_ref())
                    && (policy != PullPolicy::Always
                        || is_built_in(&image)
                        || by_id(&image, &source.name)) =>
            {
                Ok(Some(image))
            }
            (Some(image), _) if is_built_in(&image) => Err(CreateError::Fetch {
                reference: source.name.clone(),
                error: FetchError::Platform(
                    "it is built in, and for this machine's platform alone".to_owned(),
                ),
            }),
            (_, PullPolicy::Always) => Ok(None),
            (Some(image), PullPolicy::Never) => Err(CreateError::Fetch {
                reference: source.name.clone(),
                error: FetchError::Platform(format!(
                    "the stored image is for {}/{}, and images are not pulled here (embedded.images.pull_policy)",
                    image.config.os, image.config.architecture
                )),
            }),
            (None, PullPolicy::Never) => Err(CreateError::ImageNotFound {
                reference: source.name.clone(),
                hint: format!(
                    "{}, and images are not pulled here (embedded.images.pull_policy): {LOAD_IT}",
                    self.aliased(store, &source.name)
                ),
            }),
            (_, PullPolicy::IfNotPresent) => Ok(None),
        }
    }

    /// What an alias that leads to nothing stands for, to be said behind its name.
    fn aliased(&self, store: &ImageStore, name: &str) -> String {
        let own = Reference::parse(name).ok();
        match self.target(store, name) {
            Ok(target) if own.as_ref() != Some(&target) => format!(" (it stands for {target})"),
            _ => String::new(),
        }
    }

    fn stored(&self, store: &ImageStore, name: &str) -> Result<Option<Arc<Image>>, CreateError> {
        let found = store.resolve(name).map_err(|error| image_error(name, &error))?;
        match self.completed(name) {
            Some(full) if found.is_none() => store.resolve(&full).map_err(|error| image_error(name, &error)),
            _ => Ok(found),
        }
    }

    /// The name with the default registry before it, when it names none and that is not the usual one.
    fn completed(&self, name: &str) -> Option<String> {
        let named =
            name.split_once('/').is_some_and(|(first, _)| first == "localhost" || first.contains(['.', ':']));
        (!named && self.default_registry != DOCKER_HUB).then(|| format!("{}/{name}", self.default_registry))
    }

    /// What a registry is asked for: the name itself, or what an alias makes of it.
    pub(crate) fn target(&self, store: &ImageStore, name: &str) -> Result<Reference, CreateError> {
        let parse = |text: &str| Reference::parse(text).map_err(|error| image_error(name, &error.into()));
        let aliases = store.aliases().map_err(|error| image_error(name, &error))?;
        let mut reference = parse(name)?;
        for hops in 0..=MOST_ALIASES {
            let any_tag = format!("{}:*", reference.repository());
            let Some(target) = aliases.get(&reference.to_string()).or_else(|| aliases.get(&any_tag)) else {
                return match self.completed(name) {
                    Some(full) if hops == 0 => parse(&full),
                    _ => Ok(reference),
                };
            };
            reference = parse(target)?;
        }
        Err(image_error(name, &Error::AliasLoop { name: name.to_owned() }))
    }
}

fn is_built_in(image: &Image) -> bool {
    image.reference == osb_engine::image::HOST
}

/// Whether the name is the start of the image's id, which no registry knows.
fn by_id(image: &Image, name: &str) -> bool {
    let id = image.id.strip_prefix("sha256:").unwrap_or(&image.id);
    id.starts_with(name.strip_prefix("sha256:").unwrap_or(name))
}

/// Whether an image is for a platform; `None` is this machine's.
pub(crate) fn is_for(image: &Image, platform: Option<&Platform>) -> bool {
    let (os, arch) = platform
        .map_or(("linux", std::env::consts::ARCH), |wanted| (wanted.os.as_str(), wanted.arch.as_str()));
    image.config.os == os && normal(&image.config.architecture) == normal(arch)
}

/// One name per processor.
pub(crate) fn normal(architecture: &str) -> &str {
    match architecture {
        "x86_64" | "x86-64" => "amd64",
        "aarch64" | "arm64/v8" | "arm64v8" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

/// A name that can be none is the caller's fault, all else is ours.
pub(crate) fn image_error(name: &str, error: &Error) -> CreateError {
    /// Most of a name that is repeated.
    const SHOWN: usize = 255;
    let account = name.split_once('@').is_some_and(|(_, digest)| !digest.starts_with("sha256:"));
    match error {
        Error::InvalidName { .. } if account || name.contains("://") => CreateError::InvalidParameter(
            "image.uri: an image's name holds neither a scheme nor an account; the account goes into image.auth"
                .to_owned(),
        ),
        Error::InvalidName { .. } if name.len() > SHOWN => {
            CreateError::InvalidParameter("image.uri is longer than an image's name can be".to_owned())
        }
        Error::InvalidName { .. } => CreateError::InvalidParameter(format!("image.uri: {error}")),
        error => CreateError::Failed(format!("the image store cannot be read: {}", told(error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use osb_engine::image::Options;
    use std::collections::BTreeMap;

    fn store(dir: &tempfile::TempDir, aliases: &[(&str, &str)]) -> ImageStore {
        let aliases: BTreeMap<_, _> =
            aliases.iter().map(|(name, target)| ((*name).to_owned(), (*target).to_owned())).collect();
        let options = Options { aliases, host_root: None, ..Options::default() };
        ImageStore::open_with(dir.path().join("data"), options).unwrap()
    }

    fn load(store: &ImageStore, dir: &tempfile::TempDir, name: &str) {
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("bin")).unwrap();
        store.load(&root, Some(name), &|_| ()).unwrap();
    }

    fn naming(policy: PullPolicy, default_registry: &str) -> Naming {
        Naming { policy, default_registry: default_registry.to_owned() }
    }

    fn source(name: &str, arch: Option<&str>) -> ImageSource {
        let platform = arch.map(|arch| Platform { os: "linux".to_owned(), arch: arch.to_owned() });
        ImageSource { name: name.to_owned(), platform, credentials: None }
    }

    #[test]
    fn a_name_that_can_be_none_is_the_callers_fault() {
        let refused = |name: &str| image_error(name, &Reference::parse(name).unwrap_err().into());
        let long = "a".repeat(100_000);
        for name in ["/etc", "../../etc", "UPPER CASE!!", &long] {
            let CreateError::InvalidParameter(message) = refused(name) else { panic!("{name}") };
            assert!(message.starts_with("image.uri") && message.len() < 600, "{message}");
        }
        for name in ["user:hunter2@r.example/a", "https://user:hunter2@r.example/a", "a@hunter2"] {
            let CreateError::InvalidParameter(message) = refused(name) else { panic!("{name}") };
            assert!(message.contains("image.auth") && !message.contains("hunter2"), "{message}");
        }
    }

    #[test]
    fn a_stored_image_comes_before_an_alias_and_both_before_a_registry() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(&dir, &[("py:*", "ghcr.io/x/python:3"), ("a", "b"), ("b", "quay.io/c:1")]);
        let naming = naming(PullPolicy::IfNotPresent, DOCKER_HUB);
        let target = |name: &str| naming.target(&store, name).unwrap().to_string();
        assert_eq!(target("py:3.12"), "ghcr.io/x/python:3");
        assert_eq!(target("a"), "quay.io/c:1");
        assert_eq!(target("team/x"), "docker.io/team/x:latest");
        assert!(naming.find(&store, &source("py:3.12", None)).unwrap().is_none());
        load(&store, &dir, "ghcr.io/x/python:3");
        assert!(naming.find(&store, &source("py:3.12", None)).unwrap().is_some());
        load(&store, &dir, "py:3.12");
        let found = naming.find(&store, &source("py:3.12", None)).unwrap().unwrap();
        assert_eq!(found.reference, "docker.io/library/py:3.12");
    }

    #[test]
    fn another_default_registry_is_for_names_without_one() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(&dir, &[("py", "docker.io/library/python:3")]);
        let naming = naming(PullPolicy::IfNotPresent, "127.0.0.1:5000");
        let target = |name: &str| naming.target(&store, name).unwrap().to_string();
        assert_eq!(target("x"), "127.0.0.1:5000/x:latest");
        assert_eq!(target("team/x:1"), "127.0.0.1:5000/team/x:1");
        assert_eq!(target("docker.io/x"), "docker.io/library/x:latest");
        assert_eq!(target("py"), "docker.io/library/python:3", "an alias names its registry");
        load(&store, &dir, "127.0.0.1:5000/x");
        assert!(naming.find(&store, &source("x", None)).unwrap().is_some());
        assert!(naming.find(&store, &source("docker.io/x", None)).unwrap().is_none());
    }

    #[test]
    fn policies() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(&dir, &[]);
        load(&store, &dir, "stored");
        let id = store.inspect("stored").unwrap().id.clone();
        let short = &id["sha256:".len()..][..12];
        let find = |policy, name: &str, arch| {
            naming(policy, DOCKER_HUB).find(&store, &source(name, arch)).map(|image| image.is_some())
        };
        let own = normal(std::env::consts::ARCH);
        assert!(find(PullPolicy::IfNotPresent, "stored", None).unwrap());
        assert!(find(PullPolicy::IfNotPresent, "stored", Some(std::env::consts::ARCH)).unwrap());
        assert!(find(PullPolicy::IfNotPresent, "stored", Some(own)).unwrap());
        assert!(!find(PullPolicy::IfNotPresent, "stored", Some("riscv64")).unwrap(), "pulled again");
        assert!(!find(PullPolicy::IfNotPresent, "absent", None).unwrap());
        assert!(!find(PullPolicy::Always, "stored", None).unwrap());
        assert!(find(PullPolicy::Always, short, None).unwrap(), "no registry knows an id");
        assert!(find(PullPolicy::Never, "stored", None).unwrap());
        assert!(matches!(find(PullPolicy::Never, "absent", None), Err(CreateError::ImageNotFound { .. })));
        store.set_alias("nick", "r.example/away:1").unwrap();
        let dangling = find(PullPolicy::Never, "nick", None).unwrap_err().to_string();
        assert!(
            dangling.contains("'nick' is not stored here (it stands for r.example/away:1)"),
            "{dangling}"
        );
        let other = find(PullPolicy::Never, "stored", Some("riscv64")).unwrap_err();
        assert!(matches!(other, CreateError::Fetch { error: FetchError::Platform(_), .. }));
    }

    #[test]
    fn no_registry_is_asked_for_the_built_in_image() {
        let dir = tempfile::tempdir().unwrap();
        for part in ["usr/bin", "etc"] {
            std::fs::create_dir_all(dir.path().join("machine").join(part)).unwrap();
        }
        let options = Options { host_root: Some(dir.path().join("machine")), ..Options::default() };
        let store = ImageStore::open_with(dir.path().join("data"), options).unwrap();
        for policy in [PullPolicy::IfNotPresent, PullPolicy::Always, PullPolicy::Never] {
            let naming = naming(policy, DOCKER_HUB);
            let find = |arch| naming.find(&store, &source("host", arch));
            assert!(find(None).unwrap().is_some());
            assert!(find(Some(std::env::consts::ARCH)).unwrap().is_some());
            let error = find(Some("riscv64")).unwrap_err().to_string();
            assert!(error.contains("built in"), "{error}");
        }
    }
}
