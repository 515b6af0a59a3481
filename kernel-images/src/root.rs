//! A bare Debian in a directory, into which packages are installed for a test.
//!
//! It is built by `mmdebstrap` like [`distro`](crate::distro), with documentation and without a
//! kernel. A cache entry holds `files/` and `recipe`, and is rebuilt when its recipe changes. Users
//! must not write to it.

use std::path::{Path, PathBuf};

use crate::{ImageCache, ImageError, digest, distro, sources};

/// The entry's name.
const NAME: &str = "debian-root";

/// Packages in addition to apt and the essential ones: an init, and the programs that check that
/// man pages and completions are found.
const PACKAGES: &str = "systemd-sysv,udev,libnss-systemd,man-db,bash-completion";

/// Prepares the entry and returns the directory of its files.
///
/// # Errors
/// Fails when it is not cached and apt cannot deliver it, without root, or when disk space or a
/// command is missing.
pub fn ensure(cache: &ImageCache) -> Result<PathBuf, ImageError> {
    let dir = cache.root().join(NAME);
    let sources = sources::debian()?;
    let recipe = recipe(&sources);
    if !is_whole(&dir, &recipe) {
        distro::need_root(NAME)?;
        let temp = cache.temp_dir()?;
        let made = temp.path().join("image");
        let files = made.join("files");
        std::fs::create_dir_all(&files).map_err(ImageError::io(&files))?;
        distro::bootstrap(PACKAGES, &[], &sources, &files)?;
        let devices = files.join("dev");
        std::fs::create_dir_all(&devices).map_err(ImageError::io(&devices))?;
        distro::write(&made.join("recipe"), recipe.as_bytes())?;
        cache.install(&made, NAME, &temp)?;
    }
    Ok(dir.join("files"))
}

/// Returns the hash of the entry's recipe.
fn recipe(sources: &[String]) -> String {
    digest::bytes(format!("1\0{PACKAGES}\0{}\0", sources::release(sources)).as_bytes())
}

fn is_whole(dir: &Path, recipe: &str) -> bool {
    std::fs::read_to_string(dir.join("recipe")).is_ok_and(|found| found == recipe)
        && dir.join("files/usr/lib/systemd/systemd").is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_is_used_until_its_recipe_changes() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join(NAME);
        let systemd = dir.join("files/usr/lib/systemd");
        std::fs::create_dir_all(&systemd).unwrap();
        let sources = |release: &str| vec![format!("deb http://d/ {release} main")];
        let wanted = recipe(&sources("bookworm"));
        std::fs::write(dir.join("recipe"), &wanted).unwrap();
        assert!(!is_whole(&dir, &wanted), "it has no init");
        std::fs::write(systemd.join("systemd"), "").unwrap();
        assert!(is_whole(&dir, &wanted));
        assert!(!is_whole(&dir, &recipe(&sources("trixie"))));
    }
}
