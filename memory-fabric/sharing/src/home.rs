//! The memory that this node lends as a home for pages.

use fabric_coherence::{Member, Number, Written};
use fabric_pages::page::{PageBytes, PageIndex};
use fabric_peers::{HomeMessage, PeerError, PeerMessage, Peers};

use crate::Failure;
use crate::engine::Engine;

struct Stored {
    number: Number,
    bytes: Box<PageBytes>,
}

/// What this node stores for the compute nodes of the VM. Takes no memory for a page until the page
/// is written back.
pub(crate) struct HomeStore {
    pages: Vec<Option<Stored>>,
}

impl HomeStore {
    pub(crate) fn new(pages: usize) -> Self {
        let pages = (0..pages).map(|_| None).collect();
        Self { pages }
    }

    /// The bytes of the page, or `None` if nobody wrote it back.
    pub(crate) fn read(&self, page: PageIndex) -> Option<&PageBytes> {
        let stored = self.pages.get(page.index())?.as_ref()?;
        Some(&stored.bytes)
    }

    /// Stores the bytes, unless there are bytes of a later grant. Returns whether they are stored.
    pub(crate) fn write(&mut self, page: PageIndex, number: Number, bytes: &PageBytes) -> bool {
        let Some(place) = self.pages.get_mut(page.index()) else {
            return false;
        };
        match place {
            Some(stored) if !number.may_replace(stored.number) => return false,
            Some(stored) => {
                stored.number = number;
                stored.bytes.copy_from_slice(bytes);
            }
            None => {
                let bytes = Box::new(*bytes);
                *place = Some(Stored { number, bytes });
            }
        }
        true
    }
}

impl<P: Peers> Engine<P> {
    pub(crate) fn home_message(
        &mut self,
        from: Member,
        message: HomeMessage,
        bytes: Option<Box<PageBytes>>,
    ) -> Result<(), Failure> {
        match (message, bytes) {
            (HomeMessage::Read { page }, _) => {
                let Some(bytes) = self.home.read(page) else {
                    return Err(Failure::NotStored { peer: from, page });
                };
                let answer = PeerMessage::Home(HomeMessage::Bytes { page });
                self.peers.send(from, answer, Some(bytes));
                Ok(())
            }
            (HomeMessage::Write { page, number }, Some(bytes)) => {
                let refused = !self.home.write(page, number, &bytes);
                self.spare_pages.push(bytes);
                let answer = PeerMessage::Home(HomeMessage::Written {
                    page,
                    number,
                    refused,
                });
                self.peers.send(from, answer, None);
                Ok(())
            }
            (HomeMessage::Bytes { page }, Some(bytes)) => {
                self.answered(from, page, false)?;
                self.home_bytes(page, bytes)
            }
            (HomeMessage::Written { page, refused, .. }, _) => {
                self.answered(from, page, true)?;
                let written = if refused {
                    Written::Refused
                } else {
                    Written::Home
                };
                self.written(page, written)
            }
            (HomeMessage::Write { page, .. } | HomeMessage::Bytes { page }, None) => {
                Err(Failure::Defect("a message came without its page", page))
            }
        }
    }

    /// A home answered; it must have been asked.
    fn answered(&mut self, from: Member, page: PageIndex, write: bool) -> Result<(), Failure> {
        if from == self.home_of(page) && self.home_waits.end(page, write) {
            return Ok(());
        }
        let peer = from;
        let reason = format!("it answers as the home of {page}, which was not asked");
        Err(PeerError::Broken { peer, reason }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_an_older_grant_are_refused() {
        let mut home = HomeStore::new(4);
        let number = |value| Number::new(value).expect("a small number");
        let page = PageIndex::new(3);
        assert!(home.read(page).is_none());
        assert!(home.write(page, number(5), &[5; 4096]));
        assert!(!home.write(page, number(4), &[4; 4096]));
        assert!(
            home.write(page, number(5), &[6; 4096]),
            "one grant in order"
        );
        assert_eq!(home.read(page), Some(&[6; 4096]));
        assert!(!home.write(PageIndex::new(4), number(9), &[0; 4096]));
    }
}
