//! From a name to an OCI layout.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::try_join_all;
use osb_protocol::image::Reference;
use tokio::sync::{Semaphore, watch};

use crate::auth::{Login, Secret};
use crate::downloads::{Collected, Downloads, blocking};
use crate::endpoint::{Endpoint, Endpoints};
use crate::error::{Error, Result};
use crate::flight::{Flight, Shared};
use crate::image::Image;
use crate::layer::Layer;
use crate::settings::{Credentials, Patience, Settings};
use crate::source::Source;
use crate::{Phase, Platform, Progress, docker_config, layout};

/// Between two messages about progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Pulls images. Cheap to clone; all clones share downloads.
#[derive(Clone, Debug)]
pub struct Puller(Arc<Shop>);

#[derive(Debug)]
struct Shop {
    settings: Settings,
    patience: Arc<Patience>,
    endpoints: Endpoints,
    downloads: Downloads,
    images: Shared<Order, Flight<Image>>,
    /// Downloads per registry: a slow one takes no place from others.
    permits: Shared<String, Semaphore>,
}

/// Who asks for the same thing shares the work.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Order {
    reference: String,
    platform: Platform,
    credentials: Option<Credentials>,
}

/// A pulled image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// Complete name that was pulled.
    pub reference: String,
    /// What the name stands for on the registry: digest of an index or of a manifest.
    pub digest: String,
    /// Digest of the manifest, the one in the layout.
    pub manifest: String,
    /// Digest of the configuration, which is the image's id.
    pub config: String,
    /// What the image is for.
    pub platform: Platform,
    /// Compressed bytes over all layers.
    pub size_bytes: u64,
    /// Layers, those left out included.
    pub layers: usize,
    /// Layers left out because they were known.
    pub known_layers: usize,
}

impl Puller {
    /// Takes the settings and makes the directory of downloads.
    ///
    /// # Errors
    /// [`Error::InvalidSettings`] for what cannot work, [`Error::Disk`].
    pub fn new(settings: Settings) -> Result<Self> {
        let endpoints = Endpoints::new(&settings)?;
        let downloads = Downloads::new(&settings.downloads_dir, settings.reserve_bytes)?;
        let patience = Arc::new(settings.patience.clone());
        Ok(Self(Arc::new(Shop {
            settings,
            patience,
            endpoints,
            downloads,
            images: Shared::default(),
            permits: Shared::default(),
        })))
    }

    /// Downloads an image into `directory`, which is new or empty, as an OCI layout.
    ///
    /// Layers for which `known_layers` says yes, to the digest of their blob or of their unpacked bytes, are left
    /// out of the layout. `progress` is told up to ten times a second. The layout may share its blobs with the
    /// directory of downloads by hard links: read them, do not write to them.
    ///
    /// Calls for the same image, platform and credentials at the same time share one download. Cancel safe: what
    /// was downloaded stays for the next pull until it is collected. A call that is dropped may, in its last
    /// moment, still have written `directory`, which is its caller's to remove.
    ///
    /// # Errors
    /// Whatever [`Error`] tells. Nothing is left in `directory` then, and a directory that was made is removed.
    pub async fn pull(
        &self,
        reference: &str,
        platform: Option<&Platform>,
        credentials: Option<Credentials>,
        directory: &Path,
        known_layers: &(dyn Fn(&str) -> bool + Sync),
        progress: &watch::Sender<Progress>,
    ) -> Result<Pulled> {
        progress.send_replace(Progress::default());
        self.tidy().await?;
        let reference = Reference::parse(reference)?;
        let platform = platform.cloned().unwrap_or_else(Platform::host);
        let order = Order {
            reference: reference.to_string(),
            platform: platform.clone(),
            credentials: credentials.clone(),
        };
        let flight = self.0.images.get(order, Flight::default);
        let image = flight.get(self.0.resolve(reference, &platform, credentials)).await?;
        let is_wanted = |layer: &&Layer| {
            !known_layers(layer.part.digest.as_str()) && !known_layers(layer.diff_id.as_str())
        };
        let wanted: Vec<&Layer> = image.layers.iter().filter(is_wanted).collect();
        self.0.check_space(&wanted)?;
        let layers = self.0.download(&image, &wanted, progress).await?;
        let (target, whole) = (directory.to_owned(), Arc::clone(&image));
        blocking(move || {
            layout::write(&target, &whole, &layers)?;
            layers.iter().for_each(|(_, blob)| blob.set_done());
            Ok(())
        })
        .await?;
        Ok(Pulled {
            reference: image.reference.to_string(),
            digest: image.digest.to_string(),
            manifest: image.manifest.digest.to_string(),
            config: image.config.digest.to_string(),
            platform: image.platform.clone(),
            size_bytes: image.layers.iter().map(|layer| layer.part.size).sum(),
            layers: image.layers.len(),
            known_layers: image.layers.len() - wanted.len(),
        })
    }

    /// Removes leftovers of broken pulls that are older than [`Settings::keep_downloads`]. Each pull does it too.
    ///
    /// # Errors
    /// When the directory of downloads cannot be read.
    pub fn collect_downloads(&self) -> Result<Collected> {
        self.0.downloads.collect(self.0.settings.keep_downloads)
    }

    async fn tidy(&self) -> Result<()> {
        let puller = self.clone();
        let collected = blocking(move || puller.collect_downloads()).await?;
        if collected.files > 0 {
            tracing::info!(files = collected.files, bytes = collected.bytes, "removed old downloads");
        }
        Ok(())
    }
}

impl Shop {
    async fn resolve(
        &self,
        reference: Reference,
        platform: &Platform,
        credentials: Option<Credentials>,
    ) -> Result<Image> {
        let endpoints = self.endpoints.of(reference.host())?;
        let mut sources = Vec::new();
        let last = endpoints.len() - 1;
        for (number, endpoint) in endpoints.into_iter().enumerate() {
            let is_last = number == last;
            // The caller's credentials are for the registry that the name tells, not for its mirrors.
            let own = credentials.clone().filter(|_| is_last);
            let login = self.login(&endpoint, own).await?;
            let patience = Arc::clone(&self.patience);
            sources.push(Source::new(endpoint, reference.path(), login, patience, is_last));
        }
        let most = self.settings.concurrent_downloads.max(1);
        let permits = self.permits.get(reference.host().to_owned(), || Semaphore::new(most));
        Image::resolve(reference, platform, sources, permits, &self.settings).await
    }

    async fn login(&self, endpoint: &Endpoint, own: Option<Credentials>) -> Result<Login> {
        if let Some(credentials) = own {
            let origin = "the credentials of the request";
            return Ok(Login { secret: Some(Secret::Basic(credentials)), origin });
        }
        let configured = self.settings.registries.get(endpoint.name());
        if let Some(credentials) = configured.and_then(|registry| registry.credentials.clone()) {
            let origin = "the credentials of the server's configuration";
            return Ok(Login { secret: Some(Secret::Basic(credentials)), origin });
        }
        let Some(path) = &self.settings.docker_config else {
            return Ok(Login::ANONYMOUS);
        };
        let secret = docker_config::find(path, endpoint.name(), &self.patience).await?;
        Ok(match secret {
            Some(secret) => {
                Login { secret: Some(secret), origin: "the credentials of Docker's configuration" }
            }
            None => Login::ANONYMOUS,
        })
    }

    fn check_space(&self, layers: &[&Layer]) -> Result<()> {
        let needed: u64 =
            layers.iter().map(|layer| layer.part.size - layer.received.load(Ordering::Relaxed)).sum();
        let available = self.downloads.available()?;
        if needed > available {
            let path = self.settings.downloads_dir.clone();
            return Err(Error::NoSpace { path, needed, available });
        }
        Ok(())
    }

    async fn download(
        &self,
        image: &Image,
        layers: &[&Layer],
        progress: &watch::Sender<Progress>,
    ) -> Result<Vec<(crate::manifest::Digest, Arc<crate::partial::Blob>)>> {
        let tell = || {
            let received = layers.iter().map(|layer| layer.received.load(Ordering::Relaxed));
            let complete = received.clone().zip(layers).filter(|(bytes, layer)| *bytes >= layer.part.size);
            let now = Progress {
                phase: Phase::Downloading,
                layers: complete.count(),
                bytes: received.sum(),
                total_bytes: layers.iter().map(|layer| layer.part.size).sum(),
                total_layers: layers.len(),
            };
            progress.send_if_modified(|told| {
                let is_news = *told != now;
                *told = now;
                is_news
            });
        };
        let downloads = try_join_all(layers.iter().map(|layer| async move {
            let blob = layer.flight.get(layer.fetch(image, &self.downloads)).await?;
            Ok((layer.part.digest.clone(), blob))
        }));
        tokio::pin!(downloads);
        let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
        loop {
            tokio::select! {
                done = &mut downloads => {
                    tell();
                    return done;
                }
                _ = ticks.tick() => tell(),
            }
        }
    }
}
