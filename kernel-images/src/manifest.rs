//! The manifest of kernels.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ImageError;

/// The manifest that comes with the source.
const BUILT_IN: &str = include_str!("../kernels.toml");

/// One kernel: a name for us, a meta package for apt, and the modules to keep.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct KernelSpec {
    /// The name used in file names and on the command line.
    pub name: String,
    /// The Debian meta package.
    pub package: String,
    /// What this kernel is for.
    #[serde(default)]
    pub about: String,
    /// Modules to keep, without `.ko`; what they depend on is kept too.
    #[serde(default)]
    pub modules: Vec<String>,
}

/// All kernels.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    #[serde(rename = "kernel")]
    kernels: Vec<KernelSpec>,
}

impl Manifest {
    /// The manifest that comes with the source.
    ///
    /// # Errors
    /// Fails when that manifest is not valid, which a test excludes.
    pub fn built_in() -> Result<Self, ImageError> {
        Self::parse(BUILT_IN, Path::new("kernel-images/kernels.toml"))
    }

    /// Reads a manifest from a file.
    ///
    /// # Errors
    /// Fails when the file cannot be read or is not valid.
    pub fn load(path: &Path) -> Result<Self, ImageError> {
        let text = std::fs::read_to_string(path).map_err(ImageError::io(path))?;
        Self::parse(&text, path)
    }

    fn parse(text: &str, path: &Path) -> Result<Self, ImageError> {
        let bad = |reason: String| ImageError::Manifest {
            path: PathBuf::from(path),
            reason,
        };
        let manifest: Self = toml::from_str(text).map_err(|e| bad(e.message().to_owned()))?;
        for (i, kernel) in manifest.kernels.iter().enumerate() {
            if !is_plain(&kernel.name) {
                return Err(bad(format!(
                    "kernel name \"{}\" must be a-z, 0-9 and -",
                    kernel.name
                )));
            }
            // A package name goes to apt as an argument, so it must not look like an option.
            if !is_plain(&kernel.package) {
                return Err(bad(format!("\"{}\" is not a package name", kernel.package)));
            }
            if manifest.kernels[..i].iter().any(|k| k.name == kernel.name) {
                return Err(bad(format!("kernel \"{}\" is there twice", kernel.name)));
            }
        }
        Ok(manifest)
    }

    /// The kernel of this name.
    ///
    /// # Errors
    /// Fails when there is none.
    pub fn kernel(&self, name: &str) -> Result<&KernelSpec, ImageError> {
        self.kernels
            .iter()
            .find(|k| k.name == name)
            .ok_or_else(|| ImageError::UnknownKernel {
                name: name.to_owned(),
                known: self
                    .kernels
                    .iter()
                    .map(|k| k.name.as_str())
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }

    /// All kernels, in the manifest's order.
    #[must_use]
    pub fn kernels(&self) -> &[KernelSpec] {
        &self.kernels
    }
}

/// Letters, digits, dots, pluses and dashes, beginning with a letter or digit.
fn is_plain(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-+.".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Manifest, ImageError> {
        Manifest::parse(text, Path::new("test.toml"))
    }

    #[test]
    fn the_built_in_manifest_has_the_two_kernels_that_scripts_name() {
        let manifest = Manifest::built_in().unwrap();
        assert_eq!(
            manifest.kernel("cloud").unwrap().package,
            "linux-image-cloud-amd64"
        );
        assert_eq!(
            manifest.kernel("full").unwrap().package,
            "linux-image-amd64"
        );
    }

    #[test]
    fn an_unknown_kernel_is_answered_with_the_known_ones() {
        let text = Manifest::built_in()
            .unwrap()
            .kernel("fat")
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("\"fat\"") && text.contains("cloud, full"),
            "{text}"
        );
    }

    #[test]
    fn a_package_name_that_looks_like_an_option_is_refused() {
        let text = "[[kernel]]\nname = \"a\"\npackage = \"--help\"\n";
        assert!(parse(text).unwrap_err().to_string().contains("--help"));
    }

    #[test]
    fn a_name_with_a_slash_and_a_name_that_is_there_twice_are_refused() {
        assert!(parse("[[kernel]]\nname = \"../a\"\npackage = \"p\"\n").is_err());
        let twice =
            "[[kernel]]\nname=\"a\"\npackage=\"p\"\n[[kernel]]\nname=\"a\"\npackage=\"q\"\n";
        assert!(parse(twice).unwrap_err().to_string().contains("twice"));
    }
}
