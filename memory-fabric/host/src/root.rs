//! The root directory of this process, which may change once, and the paths of files before and
//! after that.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The present root, as it was called before it was the root. Global, as the root itself.
static ROOT: OnceLock<PathBuf> = OnceLock::new();

/// Notes that the directory `path`, canonical, is the root of this process from now on. The root
/// changes at most once.
pub fn changed_to(path: PathBuf) {
    let _ = ROOT.set(path);
}

/// Returns where a file is now that was named before the root changed. What is outside the present
/// root has no path any more, and keeps the one that it had.
#[must_use]
pub fn path_now(path: &Path) -> PathBuf {
    below(ROOT.get().map(PathBuf::as_path), path)
}

fn below(root: Option<&Path>, path: &Path) -> PathBuf {
    let inside = root.and_then(|root| path.strip_prefix(root).ok());
    inside.map_or_else(|| path.to_owned(), |inside| Path::new("/").join(inside))
}

/// A file of the kernel that is read many times, and also after the root has changed to a directory
/// that does not have it: it is opened once.
#[derive(Debug)]
pub struct ProcFile {
    path: &'static str,
    opened: OnceLock<Option<File>>,
}

impl ProcFile {
    /// A file that is opened when it is read first, or by [`keep_open`](Self::keep_open).
    #[must_use]
    pub const fn new(path: &'static str) -> Self {
        let opened = OnceLock::new();
        Self { path, opened }
    }

    /// Opens it, if it is there.
    pub fn keep_open(&self) -> Option<&File> {
        let opened = self.opened.get_or_init(|| File::open(self.path).ok());
        opened.as_ref()
    }

    /// Returns what it has now; `None` if there is no such file, or it cannot be read.
    pub fn read(&self) -> Option<String> {
        let file = self.keep_open()?;
        let mut text = Vec::new();
        let mut part = [0; 4096];
        loop {
            let offset = u64::try_from(text.len()).ok()?;
            match file.read_at(&mut part, offset).ok()? {
                0 => return String::from_utf8(text).ok(),
                count => text.extend_from_slice(&part[..count]),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_kernel_says_what_is_so_at_each_time() {
        static STATUS: ProcFile = ProcFile::new("/proc/self/stat");
        static ABSENT: ProcFile = ProcFile::new("/proc/self/none");
        assert_eq!(ABSENT.read(), None);
        let first = STATUS.read().expect("it is there");
        assert!(
            first.starts_with(&std::process::id().to_string()),
            "{first}"
        );
        // The fields have times, which a sum of some milliseconds changes.
        let begun = std::time::Instant::now();
        while STATUS.read().expect("it is there") == first {
            assert!(begun.elapsed().as_secs() < 60, "it says the same: {first}");
        }
    }

    #[test]
    fn files_below_the_new_root_lose_its_path_and_others_keep_theirs() {
        let root = Some(Path::new("/srv/vm"));
        for (root, before, now) in [
            (None, "/srv/vm/out/report", "/srv/vm/out/report"),
            (root, "/srv/vm/out/report", "/out/report"),
            (root, "/srv/vm", "/"),
            (root, "/srv/vms/report", "/srv/vms/report"),
        ] {
            assert_eq!(below(root, Path::new(before)), Path::new(now), "{before}");
        }
    }
}
