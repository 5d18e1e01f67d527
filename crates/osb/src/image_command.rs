//! The program that an image brings along, for `osb run` without a command. The API does not tell it: it is looked up
//! in the image store of this machine.

use anyhow::Context as _;
use osb_engine::image::{Error, ImageStore, Options};
use osb_server::config::Env;

/// Entrypoint and command of a stored image; `None` when the image is not stored here.
///
/// # Errors
/// When the store cannot be looked at.
pub(crate) fn of(name: &str) -> anyhow::Result<Option<Vec<String>>> {
    let embedded = crate::server::read_config(None, &Env::of_process())?.embedded;
    if !embedded.data_dir.is_dir() {
        return Ok(None);
    }
    let options = Options { aliases: embedded.image_aliases, ..Options::default() };
    let store = ImageStore::open_with(&embedded.data_dir, options)
        .with_context(|| format!("image store in {}", embedded.data_dir.display()))?;
    match store.inspect(name) {
        Ok(image) => {
            let config = &image.config;
            Ok(Some(config.entrypoint.iter().chain(&config.cmd).cloned().collect()))
        }
        Err(Error::NotFound { .. } | Error::AliasDangling { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
