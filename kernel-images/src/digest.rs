//! SHA-256 of files and trees.

use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::ImageError;

/// Returns the hash of a file, as 64 hexadecimal digits.
///
/// # Errors
/// Fails when the file cannot be read.
pub fn file(path: &Path) -> Result<String, ImageError> {
    let mut hasher = Sha256::new();
    update(&mut hasher, path)?;
    Ok(hex(hasher))
}

/// Returns the hash of bytes, as 64 hexadecimal digits.
#[must_use]
pub fn bytes(bytes: &[u8]) -> String {
    hex(Sha256::new_with_prefix(bytes))
}

/// Returns the hash of every regular file below `root`: of relative paths, sizes and contents.
///
/// # Errors
/// Fails when something below `root` cannot be read.
pub fn tree(root: &Path) -> Result<String, ImageError> {
    let mut hasher = Sha256::new();
    for path in files(root)? {
        let relative = path.strip_prefix(root).unwrap_or(&path);
        let size = std::fs::metadata(&path)
            .map_err(ImageError::io(&path))?
            .len();
        hasher.update(format!("{}\0{size}\0", relative.display()));
        update(&mut hasher, &path)?;
    }
    Ok(hex(hasher))
}

/// Returns every regular file below `root`, sorted.
///
/// # Errors
/// Fails when a directory cannot be read.
pub fn files(root: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let mut found = Vec::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).map_err(ImageError::io(&dir))? {
            let entry = entry.map_err(ImageError::io(&dir))?;
            let kind = entry.file_type().map_err(ImageError::io(&entry.path()))?;
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

fn update(hasher: &mut Sha256, path: &Path) -> Result<(), ImageError> {
    let mut file = std::fs::File::open(path).map_err(ImageError::io(path))?;
    let mut buffer = vec![0; 1 << 18];
    loop {
        let n = file.read(&mut buffer).map_err(ImageError::io(path))?;
        if n == 0 {
            return Ok(());
        }
        hasher.update(&buffer[..n]);
    }
}

fn hex(hasher: Sha256) -> String {
    let mut text = String::with_capacity(64);
    for byte in hasher.finalize() {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_file_is_that_of_the_standard() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        // FIPS 180-2, appendix B.1.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(file(&path).unwrap(), expected);
    }

    #[test]
    fn the_hash_of_a_tree_changes_with_a_byte_and_with_a_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let path = dir.path().join("sub/a");
        std::fs::write(&path, "1").unwrap();
        let first = tree(dir.path()).unwrap();
        std::fs::write(&path, "2").unwrap();
        let second = tree(dir.path()).unwrap();
        std::fs::rename(&path, dir.path().join("sub/b")).unwrap();
        let third = tree(dir.path()).unwrap();
        assert!(first != second && second != third);
    }
}
