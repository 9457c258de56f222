"""What tests of several folders share: hand-written fakes and helpers around real servers."""
