//! The manifest of kernels.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ImageError;

/// The built-in manifest.
const BUILT_IN: &str = include_str!("../kernels.toml");

/// One kernel: its name here, a meta package for apt, and the modules to keep.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct KernelSpec {
    /// The name used in file names and on the command line.
    pub name: String,
    /// The Debian meta package.
    pub package: String,
    /// The suite that has it, if that is not the release that apt is set up for.
    #[serde(default)]
    pub suite: Option<String>,
    /// The purpose of this kernel.
    #[serde(default)]
    pub about: String,
    /// Modules to keep, without `.ko`; their dependencies are kept too.
    #[serde(default)]
    pub modules: Vec<String>,
}

/// One distribution: its name here, and its packages.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct DistroSpec {
    /// The name used in file names and on the command line.
    pub name: String,
    /// Its purpose.
    #[serde(default)]
    pub about: String,
    /// The size of its disk, in MiB.
    pub disk_mib: u32,
    /// The packages to install, in addition to the minimal Debian.
    pub packages: Vec<String>,
}

/// All kernels and distributions.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    #[serde(rename = "kernel")]
    kernels: Vec<KernelSpec>,
    #[serde(rename = "distro", default)]
    distros: Vec<DistroSpec>,
}

impl Manifest {
    /// The built-in manifest.
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
        let of_kernels = manifest
            .kernels
            .iter()
            .map(|k| (k.name.as_str(), &k.package));
        let of_distros = manifest.distros.iter();
        let of_distros = of_distros.flat_map(|d| d.packages.iter().map(|p| (d.name.as_str(), p)));
        for (name, package) in of_kernels.chain(of_distros) {
            if !is_plain(name) {
                return Err(bad(format!("name \"{name}\" must be a-z, 0-9 and -")));
            }
            // A package name goes to apt as an argument, so it must not look like an option.
            if !is_plain(package) {
                return Err(bad(format!("\"{package}\" is not a package name")));
            }
        }
        // A suite is a word of a line of apt's sources.
        let mut suites = manifest.kernels.iter().filter_map(|k| k.suite.as_ref());
        if let Some(suite) = suites.find(|suite| !is_plain(suite)) {
            return Err(bad(format!("\"{suite}\" is not the name of a suite")));
        }
        // Each name is a directory of the cache.
        let names = manifest.kernels.iter().map(|k| &k.name);
        let mut names: Vec<_> = names
            .chain(manifest.distros.iter().map(|d| &d.name))
            .collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(bad(format!("\"{}\" is listed twice", twice[0])));
        }
        Ok(manifest)
    }

    /// Returns the kernel of this name.
    ///
    /// # Errors
    /// Fails when there is none.
    pub fn kernel(&self, name: &str) -> Result<&KernelSpec, ImageError> {
        find(&self.kernels, |kernel| &kernel.name, name).map_err(|known| {
            let name = name.to_owned();
            ImageError::UnknownKernel { name, known }
        })
    }

    /// Returns the distribution of this name.
    ///
    /// # Errors
    /// Fails when there is none.
    pub fn distro(&self, name: &str) -> Result<&DistroSpec, ImageError> {
        find(&self.distros, |distro| &distro.name, name).map_err(|known| {
            let name = name.to_owned();
            ImageError::UnknownDistro { name, known }
        })
    }

    /// Returns all kernels, in the manifest's order.
    #[must_use]
    pub fn kernels(&self) -> &[KernelSpec] {
        &self.kernels
    }
}

/// Returns the entry of this name, or the known names.
fn find<'a, T>(list: &'a [T], name_of: fn(&T) -> &str, name: &str) -> Result<&'a T, String> {
    let found = list.iter().find(|item| name_of(item) == name);
    let known = || list.iter().map(name_of).collect::<Vec<_>>().join(", ");
    found.ok_or_else(known)
}

/// Returns whether a name has only letters, digits, dots, pluses and dashes, and starts with a
/// letter or digit.
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
    fn a_suite_is_optional_and_one_word() {
        let kernel = |suite: &str| {
            parse(&format!(
                "[[kernel]]\nname=\"a\"\npackage=\"p\"\nsuite=\"{suite}\"\n"
            ))
        };
        let manifest = kernel("r-backports").unwrap();
        let suite = manifest.kernel("a").unwrap().suite.as_deref();
        assert_eq!(suite, Some("r-backports"));
        let text = kernel("sid main\\ndeb x").unwrap_err().to_string();
        assert!(text.contains("is not the name of a suite"), "{text}");
        let built_in = Manifest::built_in().unwrap();
        assert_eq!(built_in.kernel("full").unwrap().suite, None);
        assert!(built_in.kernel("backports").unwrap().suite.is_some());
    }

    #[test]
    fn a_distribution_has_a_name_of_its_own_and_packages_that_are_names() {
        assert!(Manifest::built_in().unwrap().distro("debian").is_ok());
        let distro = |name: &str, package: &str| {
            format!(
                "[[kernel]]\nname=\"a\"\npackage=\"p\"\n[[distro]]\nname=\"{name}\"\n\
                 disk_mib=1\npackages=[\"{package}\"]\n"
            )
        };
        assert!(parse(&distro("b", "p")).is_ok());
        let text = parse(&distro("a", "p")).unwrap_err().to_string();
        assert!(text.contains("\"a\" is listed twice"), "{text}");
        assert!(parse(&distro("b", "p,--help")).is_err());
        let text = parse(&distro("b", "p")).unwrap().distro("c").unwrap_err();
        assert!(text.to_string().contains("has: b"), "{text}");
    }

    #[test]
    fn a_name_with_a_slash_and_a_name_that_is_there_twice_are_refused() {
        assert!(parse("[[kernel]]\nname = \"../a\"\npackage = \"p\"\n").is_err());
        let twice =
            "[[kernel]]\nname=\"a\"\npackage=\"p\"\n[[kernel]]\nname=\"a\"\npackage=\"q\"\n";
        assert!(parse(twice).unwrap_err().to_string().contains("twice"));
    }
}
